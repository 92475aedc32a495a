"""Trains WordPiece and BPE vocabularies from word counts."""

import collections
import itertools
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
from bert_jax.tokenizers.tokenizer import Tokenizer, byte_bpe, char_bpe, with_cleaning, wordpiece
from data_prep.vocabularies.merges import MIN_COUNT, MergeResult, learn_merges

COVERAGE = 0.99995
"""Share of the characters of the text that are kept by default, as in the SentencePiece kinds."""
_MAX_ALPHABET_SHARE = 0.5
"""Of the vocabulary, for more than the `_FEW` most frequent characters and for ASCII."""
_FEW = 1000
_MANY_UNKNOWN = 0.001
"""Share of the bytes of the text that become unknown, above which there is a note."""
_ASCII = frozenset(map(chr, range(33, 127)))

_ORIGIN = "the trained vocabulary"


def train_wordpiece(
    counts: Mapping[str, int],
    vocab_size: int,
    lowercase: bool,
    *,
    score: str = "count",
    strip_accents: bool | None = None,
    max_characters: int | None = None,
    min_count: int = MIN_COUNT,
) -> Tokenizer:
    """Trains a tokenizer like BERT's: ids 0..4 are [PAD] [UNK] [CLS] [SEP] [MASK], then characters, then merged pieces.

    Starts from characters, with "##" before those inside a word: the most frequent ones, which make up `COVERAGE` of
    the text, and ASCII. If they take more than half of the vocabulary, there are at least 1,000 and no ASCII.

    Args:
      counts: word counts of `counting.BertWordCounter`; their order breaks ties.
      vocab_size: number of pieces; if the text gives fewer, a note is printed on stderr.
      lowercase: whether the words are lower-cased; the tokenizer then lower-cases texts.
      strip_accents: whether they have no accents; the tokenizer then strips them. None: the value of `lowercase`.
      score: the order of merges, one of `merges.SCORES`.
      max_characters: number of different characters to keep, the most frequent, besides ASCII; None: as above.
      min_count: pairs that occur less often are not merged.

    Raises:
      UserError: there are no words, or vocab_size is too small for the characters.
    """
    words = [word for word in counts if len(word) <= MAX_CHARS_PER_WORD]
    alphabet = _alphabet({word: counts[word] for word in words}, max_characters, vocab_size, lowercase)
    words = [word for word in words if alphabet.issuperset(word)]
    inside = {c: f"{CONTINUATION}{c}" for c in alphabet}
    continuing = {inside[c] for word in words for c in word[1:]} | {inside[c] for c in alphabet & _ASCII if c.isalnum()}
    pieces = [*SPECIAL_TOKENS, *sorted(alphabet), *sorted(continuing)]
    every, long = _sizes(counts, counts), _sizes((word for word in counts if len(word) > MAX_CHARS_PER_WORD), counts)
    _note_unknown(every, every - long - _sizes(words, counts), long, len(alphabet))
    # A generator, because the list of all spelled words would take more memory than everything else.
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
    return with_cleaning(wordpiece(merged.pieces, lowercase, _ORIGIN, strip_accents))


def train_char_bpe(
    counts: Mapping[str, int],
    vocab_size: int,
    lowercase: bool,
    *,
    strip_accents: bool | None = None,
    max_characters: int | None = None,
    min_count: int = MIN_COUNT,
) -> Tokenizer:
    """Trains BPE over BERT's words: ids 0..4 are special tokens, then "▁" and the characters, then merged pieces.

    Every word starts with "▁", which is treated as one of its characters. Arguments and errors are those of
    `train_wordpiece`.
    """
    alphabet = _alphabet(counts, max_characters, vocab_size, lowercase)
    words = [word for word in counts if alphabet.issuperset(word)]
    rare = sum(counts[word] * len(c.encode()) for word in counts for c in set(word) - alphabet)
    _note_unknown(_sizes(counts, counts), rare, 0, len(alphabet))
    pieces = [*SPECIAL_TOKENS, WORD_START, *sorted(alphabet - {WORD_START})]
    split = _split_long_words((f"{WORD_START}{word}", counts[word]) for word in words)
    merged = _learn(split, list(split.values()), pieces, vocab_size, min_count=min_count)
    return with_cleaning(char_bpe(merged.pieces, merged.merges, lowercase, _ORIGIN, strip_accents))


def train_byte_bpe(
    counts: Mapping[str, int], vocab_size: int, lowercase: bool, *, min_count: int = MIN_COUNT
) -> Tokenizer:
    """Trains a tokenizer like RoBERTa's: ids 0..4 are <s> <pad> </s> <unk> <mask>, then 256 bytes, then merged pieces.

    Args:
      counts: word counts of `counting.ByteWordCounter`; their order breaks ties.
      vocab_size, lowercase, min_count: as for `train_wordpiece`.

    Raises:
      UserError: there are no words, or vocab_size is below 261.
    """
    pieces = [*BYTE_SPECIAL_TOKENS, *byte_alphabet()]
    split = _split_long_words(counts.items())
    merged = _learn(split, list(split.values()), pieces, vocab_size, min_count=min_count)
    vocab = {piece: i for i, piece in enumerate(merged.pieces)}
    return with_cleaning(byte_bpe(vocab, merged.merges, lowercase, prefix_space=True, origin=_ORIGIN))


def vocab_size_error(vocab_size: int, least: int) -> UserError:
    """The error for a vocab_size that is too small for the characters."""
    return UserError(f"--vocab-size {vocab_size} is too small for the characters of this text; use at least {least}")


def warn_if_fewer_pieces(num_pieces: int, vocab_size: int) -> None:
    """Prints a note on stderr if there are fewer than `vocab_size` pieces."""
    if num_pieces < vocab_size:
        print(f"note: the text gives only {num_pieces} pieces, not {vocab_size}", file=sys.stderr)


def _learn(
    words: Iterable[Iterable[str]], counts: Sequence[int], pieces: Sequence[str], vocab_size: int, **options
) -> MergeResult:
    if not counts:
        raise UserError("no words in the text; a tokenizer cannot be trained on it")
    if len(pieces) > vocab_size:
        raise vocab_size_error(vocab_size, len(pieces))
    merged = learn_merges(words, counts, pieces, vocab_size, **options)
    warn_if_fewer_pieces(len(merged.pieces), vocab_size)
    return merged


def _alphabet(words: Mapping[str, int], size: int | None, vocab_size: int, lowercase: bool) -> frozenset[str]:
    """The characters to keep: the `size` most frequent, or by default those that make up `COVERAGE`; and ASCII."""
    counts: collections.Counter[str] = collections.Counter()
    inside = set()
    for word, frequency in words.items():
        for c in word:
            counts[c] += frequency
        inside.update(word[1:])
    ranked = sorted(counts, key=lambda c: (-counts[c], c))
    room = _MAX_ALPHABET_SHARE * vocab_size
    if size is None:
        covered = itertools.accumulate(counts[c] for c in ranked)
        size = next((i for i, sum_ in enumerate(covered, 1) if sum_ >= COVERAGE * counts.total()), 0)
        pieces = itertools.accumulate(1 + (c in inside) for c in ranked)
        size = min(size, max(_FEW, sum(number <= room for number in pieces)))
    kept = set(ranked[:size])
    ascii_kept = {c for c in _ASCII if not (lowercase and c.isupper())}
    added = ascii_kept - kept
    if sum(1 + (c in inside) for c in kept) + sum(1 + c.isalnum() for c in added) <= room:
        kept |= added
    return frozenset(kept)


def _note_unknown(every: int, rare: int, long: int, characters: int) -> None:
    """Prints a note on stderr if much of the text becomes unknown.

    Args:
      every: bytes of the words of the text.
      rare: of those with a character that is not kept; in BPE of these characters alone.
      long: of words that are too long.
      characters: number of characters that are kept.
    """
    causes = []
    if rare > _MANY_UNKNOWN * every:
        causes.append(
            f"{rare / every:.2%} by characters that are not among the {characters:,} kept, raise --max-characters or"
            " --vocab-size, or take --kind byte-bpe"
        )
    if long > _MANY_UNKNOWN * every:
        causes.append(
            f"{long / every:.2%} in words of more than {MAX_CHARS_PER_WORD} characters, take --kind"
            " sentencepiece-unigram for scripts without spaces"
        )
    if causes:
        share = (rare + long) / every
        print(f"note: {share:.2%} of the bytes of the text become unknown: {'; '.join(causes)}", file=sys.stderr)


def _sizes(words: Iterable[str], counts: Mapping[str, int]) -> int:
    """Bytes of words in the text."""
    return sum(counts[word] * len(word.encode()) for word in words)


def _split_long_words(words: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Splits long words, such as sentences of a script without spaces: each merge reads whole words."""
    split: collections.Counter[str] = collections.Counter()
    for word, count in words:
        for start in range(0, len(word), MAX_CHARS_PER_WORD):
            split[word[start : start + MAX_CHARS_PER_WORD]] += count
    return split
