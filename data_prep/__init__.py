"""The corpus pipeline: sources, cleaning, sentences, tokenizer training, writing. Needs no jax."""
