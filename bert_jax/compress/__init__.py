"""Smaller models from larger ones: distillation on the data of a task."""
