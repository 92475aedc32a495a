"""The pipeline: sources -> clean -> de-duplicate -> split -> sentences -> ids -> corpus."""

import dataclasses
import hashlib
import itertools
import math
import multiprocessing
import os
from collections.abc import Iterator

import numpy as np

from bert_jax.errors import UserError
from bert_jax.tokenizer import Tokenizer
from data_prep.clean import clean
from data_prep.parallel import ordered_map
from data_prep.sentences import split_lines, split_sentences
from data_prep.sources import Document, Source
from data_prep.writer import CorpusWriter

DEFAULT_VALIDATION_FRACTION = 0.01

# Enough that handing a task to a process costs nothing beside it, little enough to stay in memory.
_CHARACTERS_PER_TASK = 1 << 19

_tokenizer: Tokenizer | None = None


@dataclasses.dataclass(frozen=True)
class _Prepared:
    digest: bytes
    """SHA-256 of the cleaned text"""
    tokens: np.ndarray
    """ids [num_tokens], uint32"""
    sentence_lengths: np.ndarray
    """tokens of each sentence [num_sentences], uint32, all positive"""
    text_bytes: int


def build(
    sources: list[Source],
    tokenizer: Tokenizer,
    directory: os.PathLike | str,
    name: str,
    workers: int = 1,
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION,
    max_shard_bytes: int = 256 << 20,
) -> dict:
    """Builds a corpus; its bytes depend on the sources and arguments but not on `workers`.

    A document goes to the validation split if a hash of its cleaned text says so: it stays where it is
    when other text is added. Documents whose cleaned text occurred before are left out; the hashes of
    all documents (16 bytes each) stay in memory.

    Args:
      sources: read one after the other.
      tokenizer: makes the ids.
      directory: new, empty, or left by an unfinished build.
      name: of the corpus; lower-case letters, digits and underscores.
      workers: processes.
      validation_fraction: expected share of documents held out, in (0, 1).
      max_shard_bytes: see CorpusWriter.

    Returns:
      the content of corpus.json.

    Raises:
      UserError: a source cannot be read, the directory is taken, or a split would have no documents.
    """
    seen: set[bytes] = set()
    dropped = {"empty_documents": 0, "duplicate_documents": 0}
    lowest, highest = 1.0, 0.0
    documents = itertools.chain.from_iterable(source.documents() for source in sources)
    with CorpusWriter(directory, name, tokenizer, max_shard_bytes) as writer:
        prepared = ordered_map(
            _prepare, _tasks(documents), workers, _name, _initialize, (tokenizer.to_json(), str(directory))
        )
        for document in itertools.chain.from_iterable(prepared):
            key = document.digest[:16]
            if not len(document.tokens):
                dropped["empty_documents"] += 1
            elif key in seen:
                dropped["duplicate_documents"] += 1
            else:
                seen.add(key)
                place = _place(document.digest)
                lowest, highest = min(lowest, place), max(highest, place)
                split = "validation" if place < validation_fraction else "train"
                writer.add(split, document.tokens, document.sentence_lengths, document.text_bytes)
        _check_splits(writer, lowest, highest)
        return writer.finish([source.facts for source in sources], dropped)


def _check_splits(writer: CorpusWriter, lowest: float, highest: float) -> None:
    train, validation = writer.documents("train"), writer.documents("validation")
    count = train + validation
    if train and validation:
        return
    if count < 2:
        raise UserError(
            f"the sources hold {count} different documents with text; a corpus needs at least 2, one to train"
            " on and one held out (with `text:` and `lines:` a blank line divides documents)"
        )
    if not validation:
        enough = math.ceil((lowest + 1e-4) * 1e4) / 1e4
        raise UserError(
            f"none of the {count} documents fell into the validation split;"
            f" --validation-fraction {enough:.4f} would hold one out, or give more text"
        )
    less = math.floor((highest - 1e-4) * 1e4) / 1e4
    raise UserError(
        f"all of the {count} documents fell into the validation split;"
        f" --validation-fraction {less:.4f} would leave one to train on"
    )


def _place(digest: bytes) -> float:
    """A document's place in [0, 1)."""
    return int.from_bytes(digest[16:24], "big") / 2**64


def _tasks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    task, size = [], 0
    for document in documents:
        task.append(document)
        size += len(document.text)
        if size >= _CHARACTERS_PER_TASK:
            yield task
            task, size = [], 0
    if task:
        yield task


def _name(task: list[Document]) -> str:
    return task[0].origin


def _initialize(tokenizer_json: str, origin: str) -> None:
    global _tokenizer
    if multiprocessing.parent_process() is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _tokenizer = Tokenizer.from_json(tokenizer_json, origin)


def _prepare(documents: list[Document]) -> list[_Prepared]:
    prepared = []
    for document in documents:
        try:
            prepared.append(_prepare_one(document))
        except Exception as error:
            error.add_note(f"while preparing the document at {document.origin}")
            raise
    return prepared


def _prepare_one(document: Document) -> _Prepared:
    text = clean(document.text)
    encoded = text.encode()
    split = split_lines if document.sentence_per_line else split_sentences
    sentences = [ids for ids in _tokenizer.encode_batch(split(text)) if ids]
    lengths = np.array([len(ids) for ids in sentences], np.uint32)
    tokens = np.fromiter(itertools.chain.from_iterable(sentences), np.uint32, int(lengths.sum()))
    return _Prepared(hashlib.sha256(encoded).digest(), tokens, lengths, len(encoded))
