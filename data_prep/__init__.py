"""The corpus pipeline: sources, cleaning, sentences, tokenizer training, writing. Runs where there is no jax."""
