"""From a config to a trained state."""
