"""WordPiece, BPE and SentencePiece with one interface; no jax."""
