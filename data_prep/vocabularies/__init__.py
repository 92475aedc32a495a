"""Training of tokenizers: word counts, merges, and sampling of text."""
