"""Writes one shard of a corpus: an ArrayRecord file, and its part of the length arrays."""

import array
import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from array_record.python import array_record_module
from etils import epath

from bert_jax.data.manifest import GROUP_COUNTS, token_dtype
from bert_jax.data.word_starts import pack_word_starts
from bert_jax.errors import UserError
from bert_jax.storage.failures import describe_full_disk
from data_prep.builder.groups import Group
from data_prep.builder.records import DocumentRecordSplitter, serialize_example, split_long_lengths

# One record per chunk, so that a record can be read without its neighbours.
_ARRAY_RECORD_OPTIONS = "group_size:1"


@contextlib.contextmanager
def _disk_errors(file: pathlib.Path) -> Iterator[None]:
    """Turns ArrayRecord's errors, e.g. of a full disk, into a UserError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if full := describe_full_disk(error):
            raise UserError(f"{file}: {full}") from error
        raise UserError(
            f"{file}: cannot be written ({str(error).splitlines()[0][:120]}); if the disk is full, make room, then"
            " start the same command again to continue"
        ) from error


class DocumentPart(NamedTuple):
    """A document, or a part of a long one."""

    tokens: np.ndarray
    """ids [num_tokens], of the corpus' type"""
    sentence_lengths: np.ndarray
    """tokens of each sentence, positive; their sum is num_tokens"""
    text_bytes: int
    """size of its text in UTF-8, for statistics"""
    unknown_bytes: int
    """bytes of its text that became unknown ids"""
    origin: str
    """where the document begins, for messages"""
    group: Group
    """that of the first part counts for the document"""


class ShardWriter:
    """Writes documents to a shard; `finish` copies it to its destination.

    The file is written to a local temporary directory and then copied, because ArrayRecord cannot write to object
    stores.
    """

    def __init__(
        self, begins_word: np.ndarray, unk_id: int, first_document: int, temporary: os.PathLike | str | None = None
    ):
        """Starts a shard.

        Args:
          begins_word: of the tokenizer, bool [vocab_size].
          unk_id: the id that is counted as unknown.
          first_document: index, in its split, of the first document in the shard.
          temporary: a local directory to write in; by default that of the system.
        """
        self._begins_word = begins_word
        self._dtype = token_dtype(len(begins_word))
        self._unk_id = unk_id
        self._document = first_document
        self._scratch = tempfile.TemporaryDirectory(prefix="writing-", dir=temporary)
        self._file = pathlib.Path(self._scratch.name) / "shard"
        self._writer = array_record_module.ArrayRecordWriter(os.fspath(self._file), _ARRAY_RECORD_OPTIONS)
        self._cutter = DocumentRecordSplitter(self._dtype)
        self._lengths: list[np.ndarray] = []
        self._word_starts: list[np.ndarray] = []
        self._document_sentences = array.array("I")
        self._record_sentences = array.array("I")
        self._token_counts = np.zeros(len(begins_word), np.int64)
        self._groups: dict[Group, dict[str, int]] = {}
        self._document_groups: list[Group] = []
        self.record_bytes = 0
        """size of the records so far, uncompressed"""

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_):
        self._scratch.cleanup()

    def add_document(self, document: Iterable[DocumentPart]) -> None:
        """Writes one document, given as one or more parts that are read one at a time.

        Sentences of more than MAX_RECORD_TOKENS are split. Exceptions get a note with the origin of the document.
        """
        part = sentences = tokens = text_bytes = unknown_bytes = 0
        unknown_before = self._token_counts[self._unk_id]
        origin = group = None
        try:
            for document_part in document:
                origin = document_part.origin
                group = document_part.group if group is None else group
                lengths = split_long_lengths(document_part.sentence_lengths)
                sentences += len(lengths)
                tokens += len(document_part.tokens)
                text_bytes += document_part.text_bytes
                unknown_bytes += document_part.unknown_bytes
                self._lengths.append(lengths)
                self._word_starts.append(pack_word_starts(document_part.tokens, lengths, self._begins_word))
                np.add.at(self._token_counts, document_part.tokens, 1)
                for record in self._cutter.add(document_part.tokens, lengths):
                    self._write(part, *record)
                    part += 1
            self._write(part, *self._cutter.flush())
        except Exception as error:
            error.add_note(f"while writing the document at {origin}")
            raise
        self._document_sentences.append(sentences)
        unknown_tokens = int(self._token_counts[self._unk_id] - unknown_before)
        counts = self._groups.setdefault(group, dict.fromkeys(GROUP_COUNTS, 0))
        self._document_groups.append(group)
        counts["documents"] += 1
        counts["sentences"] += sentences
        counts["tokens"] += tokens
        counts["unknown_tokens"] += unknown_tokens
        counts["text_bytes"] += text_bytes
        counts["unknown_bytes"] += unknown_bytes
        self._document += 1

    def _write(self, part: int, tokens: np.ndarray, lengths: np.ndarray) -> None:
        raw = serialize_example(self._document, part, tokens, np.cumsum(lengths).astype("<u2"))
        with _disk_errors(self._file):
            self._writer.write(raw)
        self.record_bytes += len(raw)
        self._record_sentences.append(len(lengths))

    def finish(self, target: epath.Path) -> tuple[dict[str, np.ndarray], dict]:
        """Copies the shard to `target`.

        Returns:
          its arrays: tokens of each sentence, sentences of each document and of each record, the group of each
          document as an index of `groups` of the counts, occurrences of each id, word starts of long sentences; and its
          counts.
        """
        with _disk_errors(self._file):
            self._writer.close()
        epath.Path(self._file).copy(target, overwrite=True)
        indices = {group: index for index, group in enumerate(self._groups)}
        arrays = {
            "sentence_lengths": np.concatenate([np.zeros(0, np.uint16), *self._lengths]),
            "document_sentences": np.array(self._document_sentences, np.uint32),
            "document_groups": np.array([indices[group] for group in self._document_groups], np.uint32),
            "record_sentences": np.array(self._record_sentences, np.uint32),
            "token_counts": self._token_counts,
            "word_starts": np.concatenate([np.zeros(0, np.uint8), *self._word_starts]),
        }
        facts = {
            "documents": len(self._document_sentences),
            "sentences": len(arrays["sentence_lengths"]),
            "tokens": int(self._token_counts.sum()),
            "records": len(self._record_sentences),
            "unknown_tokens": int(self._token_counts[self._unk_id]),
            **{
                count: sum(counts[count] for counts in self._groups.values())
                for count in ("text_bytes", "unknown_bytes")
            },
            "record_bytes": self.record_bytes,
            "word_start_bytes": len(arrays["word_starts"]),
            "groups": [group._asdict() | counts for group, counts in self._groups.items()],
        }
        return arrays, facts
