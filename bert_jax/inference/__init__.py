"""Inference: fill_mask, encode, forward."""
