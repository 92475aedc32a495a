"""Families of models under their names at Hugging Face's: from and to our configs, heads and parameters."""
