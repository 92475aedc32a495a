"""Several processes that are one run: how they find, watch and tell each other."""
