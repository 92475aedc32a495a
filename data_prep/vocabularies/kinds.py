"""WordPiece and BPE vocabularies from counts of words."""

import collections
import sys
from collections.abc import Iterable, Mapping, Sequence

from bert_jax.errors import UserError
from bert_jax.tokenizers.kinds import (
    BYTE_SPECIAL_TOKENS,
    CONTINUATION,
    MAX_CHARS_PER_WORD,
    SPECIAL_TOKENS,
    WORD_START,
    byte_alphabet,
)
from bert_jax.tokenizers.tokenizer import Tokenizer, byte_bpe, char_bpe, wordpiece
from data_prep.vocabularies.merges import MIN_COUNT, Merged, learn

MAX_CHARACTERS = 1000
"""Rarer characters become unknown; each kept one takes a piece, two in WordPiece."""

_ORIGIN = "the trained vocabulary"


def train_wordpiece(
    counts: Mapping[str, int],
    vocab_size: int,
    lowercase: bool,
    *,
    score: str = "count",
    max_characters: int = MAX_CHARACTERS,
    min_count: int = MIN_COUNT,
) -> Tokenizer:
    """Trains BERT's kind: [PAD] [UNK] [CLS] [SEP] [MASK] are 0..4, then characters, then what merges make of them.

    Starts from characters, with "##" before those inside a word.

    Args:
      counts: of words as `counting.BertWords` makes them; their order decides ties.
      vocab_size: number of pieces; fewer where the text has no more, which is said on stderr.
      lowercase: whether the words are lower-cased, as texts then will be.
      score: which pairs to join first, one of `merges.SCORES`.
      max_characters: how many different characters are kept, the most frequent.
      min_count: pairs that occur less often are not joined.

    Raises:
      UserError: no words, or a vocab_size that cannot hold the characters.
    """
    words = [word for word in counts if len(word) <= MAX_CHARS_PER_WORD]
    alphabet = _alphabet({word: counts[word] for word in words}, max_characters)
    words = [word for word in words if alphabet.issuperset(word)]
    inside = {c: f"{CONTINUATION}{c}" for c in alphabet}
    pieces = [*SPECIAL_TOKENS, *sorted(alphabet), *sorted({inside[c] for word in words for c in word[1:]})]
    # Spelled one at a time: all of them at once would take more memory than anything else.
    spelled = ([word[0], *(inside[c] for c in word[1:])] for word in words)
    merged = _learn(
        spelled,
        [counts[word] for word in words],
        pieces,
        vocab_size,
        score=score,
        continuation=CONTINUATION,
        min_count=min_count,
    )
    return wordpiece(merged.pieces, lowercase, _ORIGIN)


def train_bpe(
    counts: Mapping[str, int],
    vocab_size: int,
    lowercase: bool,
    *,
    max_characters: int = MAX_CHARACTERS,
    min_count: int = MIN_COUNT,
) -> Tokenizer:
    """Trains BPE over BERT's words: special tokens are 0..4, then "▁" and the characters, then merges.

    "▁" stands in front of every word as if it were one of its characters. The arguments and errors are those of
    `train_wordpiece`.
    """
    alphabet = _alphabet(counts, max_characters)
    words = [word for word in counts if alphabet.issuperset(word)]
    pieces = [*SPECIAL_TOKENS, WORD_START, *sorted(alphabet - {WORD_START})]
    cut = _cut((f"{WORD_START}{word}", counts[word]) for word in words)
    merged = _learn(cut, list(cut.values()), pieces, vocab_size, min_count=min_count)
    return char_bpe(merged.pieces, merged.merges, lowercase, _ORIGIN)


def train_byte_bpe(
    counts: Mapping[str, int], vocab_size: int, lowercase: bool, *, min_count: int = MIN_COUNT
) -> Tokenizer:
    """Trains RoBERTa's kind: <s> <pad> </s> <unk> <mask> are 0..4, then the 256 bytes, then merges.

    Args:
      counts: of words as `counting.ByteWords` makes them; their order decides ties.
      vocab_size, lowercase, min_count: as for `train_wordpiece`.

    Raises:
      UserError: no words, or a vocab_size below 261.
    """
    pieces = [*BYTE_SPECIAL_TOKENS, *byte_alphabet()]
    cut = _cut(counts.items())
    merged = _learn(cut, list(cut.values()), pieces, vocab_size, min_count=min_count)
    vocab = {piece: i for i, piece in enumerate(merged.pieces)}
    return byte_bpe(vocab, merged.merges, lowercase, prefix_space=True, origin=_ORIGIN)


def too_small(vocab_size: int, least: int) -> UserError:
    """The error for a vocabulary that cannot hold what it must."""
    return UserError(f"--vocab-size {vocab_size} cannot hold the characters of this text; use at least {least}")


def note_size(found: int, vocab_size: int) -> None:
    """Says on stderr where a text gives fewer pieces than were asked for."""
    if found < vocab_size:
        print(f"note: the text gives only {found} pieces, not {vocab_size}", file=sys.stderr)


def _learn(
    words: Iterable[Iterable[str]], counts: Sequence[int], pieces: Sequence[str], vocab_size: int, **options
) -> Merged:
    if not counts:
        raise UserError("no words in the text; a tokenizer cannot be trained on it")
    if len(pieces) > vocab_size:
        raise too_small(vocab_size, len(pieces))
    merged = learn(words, counts, pieces, vocab_size, **options)
    note_size(len(merged.pieces), vocab_size)
    return merged


def _alphabet(words: Mapping[str, int], size: int) -> frozenset[str]:
    counts: collections.Counter[str] = collections.Counter()
    for word, frequency in words.items():
        for c in word:
            counts[c] += frequency
    return frozenset(sorted(counts, key=lambda c: (-counts[c], c))[:size])


def _cut(words: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Cuts long words, such as sentences of a script without spaces: each join reads the words it changes in full."""
    cut: collections.Counter[str] = collections.Counter()
    for word, count in words:
        for start in range(0, len(word), MAX_CHARS_PER_WORD):
            cut[word[start : start + MAX_CHARS_PER_WORD]] += count
    return cut
