"""Masking and losses: masked language modelling and sentence pairs."""
