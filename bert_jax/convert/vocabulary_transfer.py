"""Word embeddings for another vocabulary from those of a source: "fast vocabulary transfer" (Gee et al. 2022)."""

from collections.abc import Sequence

import numpy as np

from bert_jax.array_types import Float
from bert_jax.tokenizers.kinds import BYTE_SPACE, CONTINUATION, WORD_START
from bert_jax.tokenizers.tokenizer import Tokenizer


def source_pieces(source: Tokenizer, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of a source that stand for each id of another tokenizer: those whose embeddings are averaged.

    A special token has that of the same role, a piece that the source has its own id, and any other piece what the
    source's tokenizer makes of its text: at the beginning of a word, or inside of one.

    Args:
      source: tokenizer of the source.
      tokenizer: another one of the same kind (`Tokenizer.kind`), e.g. the source's with more pieces.

    Returns:
      a list of ids for each id of `tokenizer`; it is empty for a piece without text, such as a single space.
    """
    roles = ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id")
    special = {getattr(tokenizer, role): getattr(source, role) for role in roles}
    known = [special.get(i, source.token_to_id(tokenizer.id_to_token(i))) for i in range(tokenizer.vocab_size)]
    new = [i for i, found in enumerate(known) if found is None]
    encoded = dict(zip(new, source.encode_batch([_text(tokenizer, i) for i in new]) if new else [], strict=True))
    for i, ids in encoded.items():
        if ids and not tokenizer.begins_word[i]:
            ids[:1] = _inside_word(source, ids[0])
    return [encoded[i] if found is None else [found] for i, found in enumerate(known)]


def transfer_rows(
    table: Float[np.ndarray, "source ..."], pieces: Sequence[Sequence[int]], initialized: Float[np.ndarray, "rows ..."]
) -> Float[np.ndarray, "rows ..."]:
    """A table with a row for each token: the mean of the source's rows.

    Args:
      table: of the source.
      pieces: of `source_pieces`.
      initialized: a table of the run's size, whose rows remain where there is no piece.
    """
    rows = np.array(initialized, np.float32)
    for i, ids in enumerate(pieces):
        if ids:
            rows[i] = table[ids[0]] if len(ids) == 1 else np.mean(table[ids], axis=0, dtype=np.float64)
    return rows


def _text(tokenizer: Tokenizer, i: int) -> str:
    """The text of a piece, with a space before it where it begins a word."""
    if tokenizer.kind == "WordPiece":
        return tokenizer.id_to_token(i).removeprefix(CONTINUATION)
    text = tokenizer.decode([i]).strip()
    return f" {text}" if text and tokenizer.begins_word[i] else text


def _inside_word(source: Tokenizer, i: int) -> list[int]:
    """The piece that continues a word with the text of a piece that begins one; the same, if there is none."""
    piece = source.id_to_token(i)
    inside = f"{CONTINUATION}{piece}" if source.kind == "WordPiece" else piece.lstrip(f"{BYTE_SPACE}{WORD_START}")
    found = source.token_to_id(inside)
    return [] if not inside else [i if found is None else found]
