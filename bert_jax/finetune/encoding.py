"""Token ids of examples: [CLS] a [SEP], or [CLS] a [SEP] b [SEP], truncated to a maximum length."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.finetune.tables import Example
from bert_jax.finetune.tagging import NO_TAG, TaggedSentence
from bert_jax.tokenizers.tokenizer import Tokenizer


class EncodedExamples(NamedTuple):
    """The tokens of a split's examples, one after the other."""

    input_ids: np.ndarray
    """int32 [T]: all tokens, special ones included."""
    token_type_ids: np.ndarray
    """int32 [T]: 1 in the second text of a pair, its [SEP] included."""
    starts: np.ndarray
    """int64 [E + 1]: first token of each example, and T; of a multiple choice [E * choices + 1], of each text."""
    labels: np.ndarray
    """int32 or float32 [E], of examples; int32 [E, C], 1 or 0 for every class; int32 [E, 2], start and end of an answer
    in its example; or int32 [T], of tokens. -1 (NaN for floats) where there is none."""
    truncated: int
    """Number of examples, or texts of a multiple choice, that lost tokens."""
    choices: int = 1
    """Texts of an example: the endings of a multiple choice, each with the context."""

    @property
    def count(self) -> int:
        """Number of examples, E."""
        return (len(self.starts) - 1) // self.choices

    @property
    def labels_tokens(self) -> bool:
        """Whether labels belong to tokens. No split has as many tokens as examples: each has [CLS] and [SEP]."""
        return len(self.labels) == len(self.input_ids)

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of tokens and labels."""
        digest = hashlib.sha256()
        for array in (self.input_ids, self.token_type_ids, self.starts, self.labels):
            digest.update(array.tobytes())
        return digest.hexdigest()

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int32 [E]; of a multiple choice of each text, [E * choices]."""
        return np.diff(self.starts).astype(np.int32)


def encode_examples(
    examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, token_types: int, separators: int = 1
) -> EncodedExamples:
    """Encode texts or pairs. Of a pair that is too long, the longer text loses its last tokens (BERT's run_classifier).

    Args:
      examples: all with one text or all with two.
      tokenizer: of the model.
      max_length: tokens of an example, special ones included.
      token_types: number of the model's token types; with fewer than 2, the second text has type 0.
      separators: [SEP] between the texts of a pair; RoBERTa has 2.
    """
    count = len(examples[0].texts) if examples else 1
    sides = [_encode_side([example.texts[side] for example in examples], tokenizer) for side in range(count)]
    specials = 2 if count == 1 else 2 + separators
    kept = _truncated_lengths(np.stack([lengths for _, lengths in sides]), max_length - specials)
    totals = kept.sum(0) + specials
    starts = np.concatenate([[0], np.cumsum(totals)])
    input_ids = np.full(starts[-1], tokenizer.sep_id, np.int32)
    token_type_ids = np.zeros(starts[-1], np.int32)
    input_ids[starts[:-1]] = tokenizer.cls_id
    position = starts[:-1] + 1
    for side, (ids, lengths) in enumerate(sides):
        source, target = (_ranges(first, kept[side]) for first in (np.cumsum(lengths) - lengths, position))
        input_ids[target] = ids[source]
        if side == 1 and token_types >= 2:
            token_type_ids[_ranges(position, kept[side] + 1)] = 1
        position = position + kept[side] + separators
    is_regression = any(isinstance(example.label, float) for example in examples)
    classes = next((len(one.label) for one in examples if isinstance(one.label, tuple)), 0)
    missing = np.nan if is_regression else (-1,) * classes if classes else -1
    labels = [missing if example.label is None else example.label for example in examples]
    truncated = int((kept.sum(0) < sum(lengths for _, lengths in sides)).sum())
    return EncodedExamples(
        input_ids, token_type_ids, starts, np.array(labels, np.float32 if is_regression else np.int32), truncated
    )


def encode_choices(
    examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, token_types: int, separators: int = 1
) -> EncodedExamples:
    """Encode each ending of a multiple choice with its context, as a pair (transformers run_swag.py).

    Args:
      examples: whose texts are the context and the endings; all have the same number.
      tokenizer, max_length, token_types, separators: as of `encode_examples`.
    """
    pairs = [Example((example.texts[0], ending), None) for example in examples for ending in example.texts[1:]]
    labels = [-1 if example.label is None else example.label for example in examples]
    encoded = encode_examples(pairs, tokenizer, max_length, token_types, separators)
    return encoded._replace(labels=np.array(labels, np.int32), choices=len(pairs) // len(examples))


def encode_sentences(
    sentences: Sequence[TaggedSentence], tags: Sequence[str], tokenizer: Tokenizer, max_length: int
) -> tuple[EncodedExamples, np.ndarray]:
    """Encode the words of tagged sentences; the first token of each word has the label of its tag.

    Args:
      sentences: words and tags.
      tags: names in the order of class indices. A tag of a validation split that is not one of them has the label -1.
      tokenizer: of the model. Words are encoded one by one, as BERT's tagging scripts do.
      max_length: tokens of an example, special ones included; later words are left out.

    Returns:
      the examples, and
      the index of each word's first token in `input_ids`, int64 [number of words]; -1: the word has none.
    """
    indices = {name: i for i, name in enumerate(tags)}
    # In byte-level vocabularies the mark of a word's beginning is the space before it.
    space = " " if tokenizer.settings.get("add_prefix_space") is False else ""
    ids, lengths = _encode_side([space + word for sentence in sentences for word in sentence.words], tokenizer)
    rows, row_labels, first_tokens, token, word, start, truncated = [], [], [], 0, 0, 0, 0
    for sentence in sentences:
        of_words = lengths[word : word + len(sentence.words)]
        total = int(of_words.sum())
        kept = min(total, max_length - 2)
        truncated += kept < total
        positions = np.cumsum(of_words) - of_words
        positions = np.where((of_words > 0) & (positions < kept), positions, -1)
        has_token = positions >= 0
        labels = np.full(kept + 2, NO_TAG, np.int32)
        labels[positions[has_token] + 1] = np.array([indices.get(tag, NO_TAG) for tag in sentence.tags])[has_token]
        rows.append(np.r_[tokenizer.cls_id, ids[token : token + kept], tokenizer.sep_id])
        row_labels.append(labels)
        first_tokens.append(np.where(has_token, start + 1 + positions, -1))
        token, word, start = token + total, word + len(sentence.words), start + kept + 2
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    input_ids, labels = (np.concatenate(arrays).astype(np.int32) for arrays in (rows, row_labels))
    examples = EncodedExamples(input_ids, np.zeros_like(input_ids), starts, labels, truncated)
    return examples, np.concatenate(first_tokens)


def _encode_side(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    ids, lengths = tokenizer.encode_flat(texts)
    return ids.astype(np.int32), lengths


def _truncated_lengths(lengths: np.ndarray, room: int) -> np.ndarray:
    """Lengths [1 or 2, E] with a sum of at most `room`: the longer text is cut first, of equal ones the second."""
    if len(lengths) == 1:
        return np.minimum(lengths, room)
    first, second = lengths
    # If both are at least half as long as the room, they end equal, or the first has one token more.
    balanced = np.stack([np.maximum(room - second, (room + 1) // 2), np.maximum(room - first, room // 2)])
    return np.where(first + second <= room, lengths, np.minimum(lengths, balanced))


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The concatenated ranges [start, start + length), int64."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
