"""Corpora on disk, and the stream of rows made from them."""
