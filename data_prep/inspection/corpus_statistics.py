"""Statistics of a corpus from its arrays and corpus.json; records are read for the sample documents only.

The results are JSON values: `bert-data inspect --json` prints them.
"""

import collections
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import numpy as np
from etils import epath

from bert_jax.command.progress import progress_bar
from bert_jax.config import DataConfig
from bert_jax.data.corpus import Corpus
from bert_jax.data.epoch_counts import measure_epoch
from bert_jax.data.epoch_plan import EpochPlanner
from bert_jax.data.manifest import MANIFEST, REBUILD, SPLITS, TOKENIZER, StoredCount, read_manifest
from bert_jax.data.mixture import smoothed_shares
from bert_jax.errors import UserError
from bert_jax.field_validation import from_json
from bert_jax.numba_cache import cached_njit
from bert_jax.tokenizers.tokenizer import Tokenizer

ROW_LENGTHS = (128, 512)
_PLANNED_TOKENS = 100_000_000
"""Tokens of a split of which examples and rows are made; in a larger one, evenly spaced windows of an epoch."""

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_FREQUENT_PIECES = 40
_SAMPLES_AT = (0.0, 0.25, 0.5, 0.75, 1.0)
_SAMPLE_TOKENS = 96
_BLOCK_DOCUMENTS = 1 << 16


class _Skipped(TypedDict):
    count: StoredCount
    bytes: StoredCount
    first: list[str]


class _Kept(TypedDict):
    documents: StoredCount
    tokens: StoredCount


class _OptionalOfSource(TypedDict, total=False):
    license: str | None
    kept: dict[str, _Kept]


class _Source(_OptionalOfSource):
    spec: str
    encodings: dict[str, StoredCount]
    documents: StoredCount
    text_bytes: StoredCount
    files: StoredCount


class _Removed(TypedDict):
    documents: StoredCount
    text_bytes: StoredCount


class _Example(TypedDict):
    origin: str
    text: str


class _Rule(_Removed):
    examples: list[_Example]


class _LineRule(TypedDict):
    lines: StoredCount
    text_bytes: StoredCount
    examples: list[_Example]


class _Group(_Removed):
    source: StoredCount
    language: str
    removed: dict[str, _Removed]


class _Filters(TypedDict):
    rules: dict[str, _Rule]
    line_rules: dict[str, _LineRule]
    mixed_documents: StoredCount
    groups: list[_Group]


class _Filtered(TypedDict, total=False):
    filters: _Filters


class _Report(_Filtered):
    """The part of corpus.json that is shown, besides what is needed to open the corpus."""

    dropped: dict[str, dict[str, StoredCount]]
    cleaned: dict[str, StoredCount]
    skipped: dict[str, _Skipped]
    settings: dict
    sources: list[_Source]


def summarize_lengths(lengths: Mapping[int, int]) -> dict:
    """Mean, quantiles by their share, and bins of lengths: two bins per power of 2.

    Each bin has the `first` and the `last` length in it, the `count` of lengths, and their sum, `tokens`. A quantile is
    the smallest length that at least this share of all lengths does not exceed.

    Args:
      lengths: how often each length, positive, occurs. Lengths that sum to T have at most sqrt(2 T) different values:
        63,000 for 2 billion.
    """
    values, counts = np.array(sorted(lengths.items()), np.int64).T
    edges = _edges(int(values[-1]))
    edges = edges[np.searchsorted(edges, values[0], "right") - 1 :]
    starts = np.searchsorted(values, edges)
    ends = np.cumsum(counts)
    bin_counts = np.diff(np.concatenate([[0], ends])[starts])
    bin_tokens = np.diff(np.concatenate([[0], np.cumsum(values * counts)])[starts])
    rows = np.stack([edges[:-1], edges[1:] - 1, bin_counts, bin_tokens], axis=1).tolist()
    return {
        "mean": int(values @ counts) / int(ends[-1]),
        "quantiles": {
            f"{share:g}": int(values[np.searchsorted(ends, share * ends[-1], "left")]) for share in _QUANTILES
        },
        "bins": [dict(zip(("first", "last", "count", "tokens"), row, strict=True)) for row in rows],
    }


def _edges(longest: int) -> np.ndarray:
    """1, 2, 3, 4, 6, 8, 11, 16, 23, 32, ...: powers of the square root of 2, the last above `longest`."""
    steps = 2 * longest.bit_length() + 1
    edges = np.unique(np.round(2 ** (np.arange(steps) / 2)).astype(np.int64))
    return edges[: np.searchsorted(edges, longest, "right") + 1]


def measure_corpus(directory: os.PathLike | str) -> dict:
    """Measures a corpus. Memory does not depend on its size: arrays are memory-mapped and read in blocks.

    Raises:
      UserError: the directory holds no finished corpus, or its arrays are damaged.
    """
    manifest = read_manifest(directory)
    from_json(_Report, manifest, epath.Path(directory) / MANIFEST, REBUILD)
    corpora = {split: Corpus.open(directory, split) for split in SPLITS}
    splits = {
        split: split_counts(manifest["splits"][split]) | measure_lengths(corpus) for split, corpus in corpora.items()
    }
    train = corpora["train"]
    tokenizer = Tokenizer.load(train.directory / TOKENIZER)
    disk_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
    disk_bytes += (epath.Path(directory) / MANIFEST).stat().length
    return {
        "directory": os.fspath(directory),
        "name": manifest["name"],
        "vocab_size": manifest["vocab_size"],
        "tokenizer_fingerprint": manifest["tokenizer"]["fingerprint"],
        "identity": train.identity,
        "disk_bytes": disk_bytes,
        "disk_bytes_per_token": disk_bytes / sum(split["tokens"] for split in splits.values()),
        "splits": splits,
        **{key: manifest[key] for key in ("dropped", "cleaned", "skipped", "settings", "sources")},
        **({"filters": manifest["filters"]} if "filters" in manifest else {}),
        "rows": measure_rows(train),
        "pieces": _pieces(train.token_counts, tokenizer),
        "samples": list(sample_documents(train, tokenizer, _SAMPLES_AT, _SAMPLE_TOKENS)),
    }


def split_counts(counts: Mapping) -> dict:
    """The counts of a split from corpus.json, with the number of shards instead of their names, and two rates.

    `unknown_rate` is the share of the text's bytes that became unknown ids: one id can stand for a long word.
    """
    return {
        **{key: count for key, count in counts.items() if key != "shards"},
        "shards": len(counts["shards"]),
        "text_bytes_per_token": counts["text_bytes"] / counts["tokens"],
        "unknown_rate": counts["unknown_bytes"] / counts["text_bytes"],
    }


def measure_lengths(corpus: Corpus) -> dict:
    """Lengths of sentences and documents of a split.

    Raises:
      UserError: its arrays are damaged.
    """
    sentence_counts = np.zeros(1 << 16, np.int64)
    documents: collections.Counter[int] = collections.Counter()
    lengths = np.asarray(corpus.sentence_lengths)
    with progress_bar(f"measuring {corpus.split}", corpus.num_sentences, "sentence") as bar:
        for offsets in _blocks(corpus):
            documents.update(_block_lengths(sentence_counts, lengths, offsets).tolist())
            bar.update(int(offsets[-1] - offsets[0]))
    if sentence_counts[0]:
        raise _damaged(corpus)
    sentences = {length: int(sentence_counts[length]) for length in np.flatnonzero(sentence_counts).tolist()}
    return {
        "sentence_tokens": summarize_lengths(sentences),
        "document_tokens": summarize_lengths(documents),
    }


def measure_rows(corpus: Corpus) -> list[dict]:
    """What an epoch of BERT's sentence pairs (segment_pair) makes of a split, for rows of each of ROW_LENGTHS.

    `coverage` is the share of the tokens that are in an example, `random_pairs` the expected share of random B.

    Args:
      corpus: whose arrays are not damaged (`measure_lengths` checks them).

    Returns:
      nothing for fewer than two documents, of which no pairs can be made.
    """
    if corpus.num_documents < 2:
        return []
    every = []
    for seq_len in ROW_LENGTHS:
        counts = measure_epoch(EpochPlanner(corpus, DataConfig(), seq_len, seed=0), _PLANNED_TOKENS)
        every.append(
            {
                "seq_len": seq_len,
                "examples": round(counts.examples * counts.scale_factor),
                "rows": round(counts.rows * counts.scale_factor),
                "coverage": counts.covered / counts.tokens,
                "packing_efficiency": counts.filled / (counts.rows * seq_len),
                "unpacked_efficiency": counts.filled / (counts.examples * seq_len),
                "random_pairs": 0.5 + 0.5 * counts.singles / counts.labelled,
            }
        )
    return every


def _blocks(corpus: Corpus) -> Iterator[np.ndarray]:
    """Document offsets of 65,536 documents at a time."""
    for start in range(0, corpus.num_documents, _BLOCK_DOCUMENTS):
        offsets = np.array(corpus.document_offsets[start : start + _BLOCK_DOCUMENTS + 1])
        # Compiled loops do not check bounds.
        if offsets[0] < 0 or offsets[-1] > corpus.num_sentences or (np.diff(offsets) < 1).any():
            raise _damaged(corpus)
        yield offsets


def _damaged(corpus: Corpus) -> UserError:
    return UserError(f"{corpus.directory}: the arrays of {corpus.split} are damaged; `bert-data verify` names the file")


@cached_njit
def _block_lengths(sentence_counts, sentence_lengths, document_offsets):
    """Counts the sentences of a block by length; returns the tokens of each document."""
    documents = np.zeros(len(document_offsets) - 1, np.int64)
    for document in range(len(documents)):
        for sentence in range(document_offsets[document], document_offsets[document + 1]):
            length = sentence_lengths[sentence]
            sentence_counts[length] += 1
            documents[document] += length
    return documents


def _pieces(token_counts: np.ndarray, tokenizer: Tokenizer) -> dict:
    """How the split uses the vocabulary; the five special tokens do not count, except [UNK] in `most_frequent`."""
    token_counts = np.asarray(token_counts)
    counts = np.delete(token_counts, list(tokenizer.special_ids))
    never, decades, start = int((counts == 0).sum()), {}, 1
    while start <= counts.max(initial=0):
        decades[f"{start:,}–{10 * start - 1:,}"] = int(((counts >= start) & (counts < 10 * start)).sum())
        start *= 10
    # Stable, so that pieces with the same count are in the order of their ids.
    order = np.argsort(-token_counts, kind="stable")[:_FREQUENT_PIECES]
    return {
        "total": len(counts),
        "never_used": never,
        "never_used_share": never / len(counts),
        "by_times_used": decades,
        "most_frequent": [
            {"piece": tokenizer.id_to_token(i), "count": int(token_counts[i])} for i in order if token_counts[i]
        ],
    }


def sample_documents(corpus: Corpus, tokenizer: Tokenizer, places: Sequence[float], max_tokens: int) -> Iterator[dict]:
    """The first tokens of some documents as text; characters that the tokenizer does not represent are missing.

    Args:
      corpus: the split.
      tokenizer: of the corpus.
      places: of the documents in the split, in [0, 1].
      max_tokens: of each document.
    """
    for document in sorted({round(share * (corpus.num_documents - 1)) for share in places}):
        first, end = (int(i) for i in corpus.document_offsets[document : document + 2])
        sentences, left, sentence = [], max_tokens, first
        while left > 0 and sentence < end:
            ids = corpus.read_sentences(sentence, sentence + 1)
            sentences.append(tokenizer.decode(ids[:left]))
            left -= len(ids)
            sentence += 1
        tokens = int(np.sum(corpus.sentence_lengths[first:end], dtype=np.int64))
        yield {"document": document, "tokens": tokens, "sentences": sentences, "cut": tokens > max_tokens}


def _obstacle(corpora: Sequence[dict]) -> str | None:
    if len({corpus["tokenizer_fingerprint"] for corpus in corpora}) > 1:
        return "have different tokenizers"
    names = collections.Counter(corpus["name"] for corpus in corpora)
    repeated = [name for name, count in names.items() if count > 1]
    return f"have the same name, {repeated[0]} (build one of them again with another --name)" if repeated else None


def weight_corpora(corpora: Sequence[dict], exponent: float) -> dict:
    """Weights q_i ~ p_i^exponent for training on several corpora, where p_i is the share of corpus i in all tokens.

    With an exponent below 1, small corpora are read more often than by size; multilingual BERT used 0.7. `repeats` are
    the epochs of a corpus while as many tokens are read as all have together. `obstacle` is why they cannot be trained
    on together, or None.
    """
    tokens = [corpus["splits"]["train"]["tokens"] for corpus in corpora]
    rows = []
    for corpus, size, weight in zip(corpora, tokens, smoothed_shares(tokens, exponent).tolist(), strict=True):
        share = size / sum(tokens)
        row = {"directory": corpus["directory"], "tokens": size, "share": share, "weight": weight}
        rows.append(row | {"repeats": weight / share})
    return {
        "sampling_exponent": exponent,
        "obstacle": _obstacle(corpora),
        "corpora": rows,
    }
