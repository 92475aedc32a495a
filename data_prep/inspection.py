"""Describes a corpus for a person."""

import os

import numpy as np

from bert_jax.data.corpus import SPLITS, TOKENIZER, Corpus, read_manifest
from bert_jax.tokenizer import Tokenizer

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_SAMPLE_SENTENCES = 4


def counts(manifest: dict) -> str:
    """A table of what a corpus holds; `manifest` is the content of corpus.json."""
    rows = [("", *SPLITS)]
    splits = [manifest["splits"][split] for split in SPLITS]
    for label, key in (("documents", "documents"), ("sentences", "sentences"), ("tokens", "tokens")):
        rows.append((label, *(f"{split[key]:,}" for split in splits)))
    rows.append(("text", *(f"{split['text_bytes'] / 1e6:,.2f} MB" for split in splits)))
    rows.append(("bytes of text per token", *(f"{s['text_bytes'] / s['tokens']:.2f}" for s in splits)))
    rows.append(("unknown tokens", *(f"{s['unknown_tokens'] / s['tokens']:.3%}" for s in splits)))
    rows.append(("records in shards", *(f"{s['records']:,} in {len(s['shards'])}" for s in splits)))
    lines = [_row(row) for row in rows]
    dropped = manifest["dropped"]
    lines.append(
        f"left out: {dropped['duplicate_documents']:,} duplicate and {dropped['empty_documents']:,} empty documents"
    )
    return "\n".join(lines)


def describe(directory: os.PathLike | str) -> str:
    """Counts, length quantiles and a sample of a corpus.

    Raises:
      UserError: there is no finished corpus.
    """
    manifest = read_manifest(directory)
    splits = [Corpus.open(directory, split) for split in SPLITS]
    size = sum(facts["bytes"] for facts in manifest["files"].values())
    train = splits[0]
    tokenizer = Tokenizer.load(train.directory / TOKENIZER)
    middle = train.num_documents // 2
    first, end = (int(i) for i in train.document_offsets[middle : middle + 2])
    lines = [
        f"{manifest['name']}: {size / 1e6:,.2f} MB on disk, {manifest['vocab_size']:,} pieces,"
        f" tokenizer {manifest['tokenizer']['fingerprint'][:12]}",
        f"sources: {', '.join(source['spec'] for source in manifest['sources'])}",
        "",
        counts(manifest),
        "",
        _row(("quantile", *(f"{q:.0%}" for q in _QUANTILES))),
    ]
    for corpus in splits:
        tokens = np.concatenate([[0], np.cumsum(corpus.sentence_lengths, dtype=np.int64)])
        lengths = {
            "tokens in a sentence": corpus.sentence_lengths,
            "tokens in a document": np.diff(tokens[corpus.document_offsets]),
        }
        for label, values in lengths.items():
            quantiles = np.quantile(values, _QUANTILES, method="nearest")
            lines.append(_row((f"{label}, {corpus.split}", *(f"{int(q):,}" for q in quantiles))))
    lines += ["", f"document {middle} of train begins:"]
    for sentence in range(first, min(end, first + _SAMPLE_SENTENCES)):
        lines.append("  " + tokenizer.decode(train.sentences(sentence, sentence + 1)))
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return f"{cells[0]:<34}" + "".join(f"{cell:>14}" for cell in cells[1:])
