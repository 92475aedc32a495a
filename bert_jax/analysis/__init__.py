"""What a model knows, where, and since when: suites of analyses (`bert-jax analyse`), and their functions on arrays."""
