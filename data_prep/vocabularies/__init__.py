"""Training of vocabularies: word counts, merges, and the kinds of tokenizers made of them."""
