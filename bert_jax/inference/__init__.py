"""A model to use: fill_mask, encode, forward."""
