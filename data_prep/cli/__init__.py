"""The commands of ``bert-data``."""
