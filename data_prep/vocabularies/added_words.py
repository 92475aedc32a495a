"""A WordPiece vocabulary with more words, such as those of a domain, as new last ids."""

import json
from collections.abc import Sequence

from bert_jax.errors import UserError, require
from bert_jax.tokenizers.tokenizer import CONTINUATION, Tokenizer


def add_words(tokenizer: Tokenizer, words: Sequence[str], origin: str) -> Tokenizer:
    """The tokenizer with words that it had split into pieces; ids of other pieces stay.

    Args:
      tokenizer: WordPiece.
      words: in the form in which the tokenizer sees them, e.g. in lower case; with ``##`` a piece inside of words.
        Those that it has already are skipped.
      origin: names the list of words in messages.

    Raises:
      UserError: a tokenizer of another kind, no new word, or one that no text would give.
    """
    require(
        tokenizer.kind == "WordPiece",
        f"--add-words: a {tokenizer.kind} vocabulary has no words of its own: use the function add_tokens of the "
        "tokenizers library",
    )
    new = [word for word in dict.fromkeys(words) if tokenizer.token_to_id(word) is None]
    require(bool(new), f"{origin} has no word that the vocabulary lacks: give one on each line")
    description = json.loads(tokenizer.to_json())
    description["model"]["vocab"] |= {word: i for i, word in enumerate(new, tokenizer.vocab_size)}
    extended = Tokenizer.from_json(json.dumps(description, ensure_ascii=False), origin)
    whole = [word for word in new if not word.startswith(CONTINUATION)]
    for word, ids in zip(whole, extended.encode_batch(whole), strict=True):
        if ids != [extended.token_to_id(word)]:
            pieces = " ".join(map(extended.id_to_token, ids))
            raise UserError(f"{origin}: the tokenizer would read '{word}' as '{pieces}': write it in that form")
    return extended
