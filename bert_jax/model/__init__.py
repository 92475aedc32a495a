"""The encoder, its heads and the model families; parameters are nested dicts of arrays."""
