"""From sources to a corpus on disk."""
