"""Parts of a loaded model: activations read by name, changed, weighed and removed."""
