"""Checkpoints in other people's formats."""
