"""Reads a corpus from end to end and compares it with what corpus.json says."""

import os

import numpy as np
from etils import epath

from bert_jax.data.corpus import (
    MANIFEST,
    MAX_RECORD_TOKENS,
    SPLITS,
    TOKENIZER,
    Corpus,
    Records,
    array_file,
    read_manifest,
)
from bert_jax.errors import UserError
from bert_jax.progress import progress
from bert_jax.tokenizer import Tokenizer
from data_prep.writer import file_facts


def verify(directory: os.PathLike | str) -> int:
    """Checks every file's SHA-256, every record, and that ids lie in the vocabulary.

    Returns:
      number of files checked.

    Raises:
      UserError: the first damage found, with the file it is in.
    """
    directory = epath.Path(directory)
    manifest = read_manifest(directory)
    files = manifest["files"]
    with progress("comparing checksums", sum(facts["bytes"] for facts in files.values()), "B") as bar:
        for name, facts in files.items():
            path = directory / name
            if not path.exists():
                raise UserError(f"{path}: missing; copy the corpus again or rebuild it")
            if file_facts(path) != facts:
                raise UserError(f"{path}: damaged, its SHA-256 is not the recorded one; copy or rebuild the corpus")
            bar.update(facts["bytes"])
    fingerprint = Tokenizer.load(directory / TOKENIZER).fingerprint
    if fingerprint != manifest["tokenizer"]["fingerprint"]:
        raise UserError(f"{directory / TOKENIZER}: not the tokenizer this corpus was built with; rebuild the corpus")
    for split in SPLITS:
        _verify_records(directory, manifest, split)
    return len(files)


def _verify_records(directory: epath.Path, manifest: dict, split: str) -> None:
    corpus = Corpus.open(directory, split)
    records = Records(directory, manifest, split)
    document = part = -1
    token_counts = np.zeros(corpus.vocab_size, np.int64)
    with progress(f"reading {split}", len(records), "record") as bar:
        for index in range(len(records)):
            record = records[index]
            first, end = corpus.record_offsets[index : index + 2]
            continues = (record.document, record.part) == (document, part + 1)
            starts = (record.document, record.part) == (document + 1, 0)
            lengths = np.diff(record.sentence_ends, prepend=0)
            sound = (
                (continues or (starts and corpus.document_offsets[document + 1] == first))
                and np.array_equal(lengths, corpus.sentence_lengths[first:end])
                and 0 < len(record.tokens) == record.sentence_ends[-1]
                and len(record.tokens) <= MAX_RECORD_TOKENS
                and record.tokens.max() < corpus.vocab_size
            )
            if not sound:
                raise UserError(
                    f"{records.path(index)}: record {index} of {split} contradicts the arrays or the"
                    " vocabulary; rebuild the corpus"
                )
            document, part = record.document, record.part
            np.add.at(token_counts, record.tokens, 1)
            bar.update()
    if (document + 1, token_counts.sum()) != (corpus.num_documents, corpus.num_tokens):
        raise UserError(f"{directory}: {split} holds other counts than {MANIFEST} says; rebuild the corpus")
    if not np.array_equal(token_counts, corpus.token_counts):
        raise UserError(f"{directory / array_file(split, 'token_counts')}: contradicts the records; rebuild the corpus")
