"""WordPiece, BPE and SentencePiece tokenizers with one interface; does not need jax."""
