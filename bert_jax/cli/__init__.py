"""The commands of ``bert-jax``."""
