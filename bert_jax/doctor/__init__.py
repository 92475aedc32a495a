"""Checks before a run."""
