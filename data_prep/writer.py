"""Writes a corpus: both splits at once, as a stream, in bounded memory. docs/corpus.md is the contract."""

import array
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from etils import epath

from bert_jax.data import corpus
from bert_jax.errors import UserError
from bert_jax.tokenizer import Tokenizer

# One record per chunk, so that a record is read without its neighbours.
_ARRAY_RECORD_OPTIONS = "group_size:1"


class CorpusWriter:
    """Writes documents to `directory`; only `finish` makes it a corpus.

    Until then the directory holds the marker `corpus.incomplete`, and a new writer clears it. Length
    arrays stay in memory (2 bytes a sentence, 8 bytes a document and a record); tokens do not.
    Shards are written to a local temporary directory and copied, so that object stores work too.
    """

    def __init__(self, directory: os.PathLike | str, name: str, tokenizer: Tokenizer, max_shard_bytes: int = 256 << 20):
        """Makes the directory.

        Args:
          directory: must not exist, be empty, or hold an unfinished corpus.
          name: lower-case letters, digits and underscores, as TFDS wants a dataset's name.
          tokenizer: the one that makes the ids; it is stored in the corpus.
          max_shard_bytes: a shard is closed once its records, uncompressed, have this size.

        Raises:
          UserError: the directory holds something else.
        """
        self._directory = epath.Path(directory)
        self._name = name
        self._tokenizer = tokenizer
        claim_directory(self._directory)
        self._scratch = tempfile.TemporaryDirectory(prefix="bert_jax-shard-")
        features = _features(tokenizer.vocab_size)
        self._splits = {
            split: _SplitWriter(
                self._directory, split, features, tokenizer, max_shard_bytes, pathlib.Path(self._scratch.name)
            )
            for split in corpus.SPLITS
        }

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, *_):
        self._scratch.cleanup()

    def add(self, split: str, tokens: np.ndarray, sentence_lengths: np.ndarray, text_bytes: int) -> None:
        """Adds one document.

        Args:
          split: "train" or "validation".
          tokens: ids [num_tokens], at least one.
          sentence_lengths: tokens of each sentence, all positive, their sum num_tokens.
          text_bytes: size of the document's text in UTF-8, for statistics.

        Raises:
          ValueError: lengths and tokens do not fit together, or an id is beyond the vocabulary.
        """
        tokens, sentence_lengths = np.asarray(tokens), np.asarray(sentence_lengths)
        if not len(tokens) or sentence_lengths.sum() != len(tokens) or sentence_lengths.min() < 1:
            raise ValueError("sentence lengths must be positive and sum to the number of tokens, at least 1")
        if tokens.min() < 0 or tokens.max() >= self._tokenizer.vocab_size:
            raise ValueError(f"token ids must be in [0, {self._tokenizer.vocab_size})")
        self._splits[split].add(tokens, sentence_lengths, text_bytes)

    def documents(self, split: str) -> int:
        """Documents added to a split so far."""
        return len(self._splits[split].document_offsets) - 1

    def finish(self, sources: list[dict], dropped: dict[str, int]) -> dict:
        """Writes what is left and, last, corpus.json.

        Args:
          sources: where the text came from, JSON values without times.
          dropped: what was left out, by reason.

        Returns:
          the content of corpus.json.

        Raises:
          ValueError: a split has no documents, which TFDS cannot say.
        """
        for split in corpus.SPLITS:
            if not self.documents(split):
                raise ValueError(f"the {split} split has no documents")
        split_facts, files, split_infos = {}, {}, []
        for split, writer in self._splits.items():
            facts, written = writer.finish(self._name)
            split_facts[split] = facts
            files |= written
            split_infos.append(
                tfds.core.SplitInfo(
                    name=split,
                    shard_lengths=[shard["records"] for shard in facts["shards"]],
                    num_bytes=writer.record_bytes,
                )
            )
        self._tokenizer.save(self._directory / corpus.TOKENIZER)
        tfds.folder_dataset.write_metadata(
            data_dir=os.fspath(self._directory),
            features=_features(self._tokenizer.vocab_size),
            split_infos=split_infos,
            filename_template=tfds.core.ShardedFileTemplate(
                data_dir=self._directory, dataset_name=self._name, filetype_suffix="array_record"
            ),
            check_data=False,
        )
        for name in (corpus.TOKENIZER, "dataset_info.json", "features.json"):
            files[name] = file_facts(self._directory / name)
        manifest = {
            "format_version": corpus.FORMAT_VERSION,
            "name": self._name,
            "tokenizer": {"file": corpus.TOKENIZER, "fingerprint": self._tokenizer.fingerprint},
            "vocab_size": self._tokenizer.vocab_size,
            "splits": split_facts,
            "dropped": dropped,
            "sources": sources,
            "files": dict(sorted(files.items())),
        }
        partial = self._directory / (corpus.MANIFEST + ".partial")
        partial.write_text(json.dumps(manifest, indent=1) + "\n")
        partial.rename(self._directory / corpus.MANIFEST)
        (self._directory / corpus.INCOMPLETE).unlink()
        return manifest


class _SplitWriter:
    def __init__(
        self,
        directory: epath.Path,
        split: str,
        features: tfds.features.FeaturesDict,
        tokenizer: Tokenizer,
        max_shard_bytes: int,
        scratch: pathlib.Path,
    ):
        self._directory = directory
        self._split = split
        self._features = features
        self._serializer = tfds.core.example_serializer.ExampleSerializer(features.get_serialized_info())
        self._dtype = corpus.token_dtype(tokenizer.vocab_size)
        self._unk_id = tokenizer.unk_id
        self._max_shard_bytes = max_shard_bytes
        self._scratch_file = scratch / split
        self._shard: array_record_module.ArrayRecordWriter | None = None
        self._shards: list[dict] = []
        self._tokens = self._unknown = self._text_bytes = 0
        self.record_bytes = 0
        # How often each id occurs: the unigram model that a pretrained one is measured against.
        self._token_counts = np.zeros(tokenizer.vocab_size, np.int64)
        self.lengths = array.array("H")
        self.document_offsets = array.array("q", [0])
        self.record_offsets = array.array("q", [0])

    def add(self, tokens: np.ndarray, sentence_lengths: np.ndarray, text_bytes: int) -> None:
        document = len(self.document_offsets) - 1
        begin = 0
        for part, lengths in enumerate(_parts(sentence_lengths)):
            end = begin + int(lengths.sum())
            self._write(document, part, tokens[begin:end], lengths)
            begin = end
        self.document_offsets.append(len(self.lengths))
        self._tokens += len(tokens)
        np.add.at(self._token_counts, tokens, 1)
        self._unknown += int(np.count_nonzero(tokens == self._unk_id))
        self._text_bytes += text_bytes

    def _write(self, document: int, part: int, tokens: np.ndarray, lengths: np.ndarray) -> None:
        example = self._features.encode_example(
            {
                "document": document,
                "part": part,
                "tokens": tokens.astype(self._dtype),
                "sentence_ends": np.cumsum(lengths).astype("<u2"),
            }
        )
        # The order of a protobuf map is otherwise free to change from run to run.
        raw = self._serializer.get_tf_example(example).SerializeToString(deterministic=True)
        if self._shard is None:
            self._shard = array_record_module.ArrayRecordWriter(os.fspath(self._scratch_file), _ARRAY_RECORD_OPTIONS)
            self._shards.append({"file": f"{self._split}-{len(self._shards):05d}.partial", "records": 0, "bytes": 0})
        self._shard.write(raw)
        self._shards[-1]["records"] += 1
        self._shards[-1]["bytes"] += len(raw)
        self.lengths.extend(lengths.tolist())
        self.record_offsets.append(len(self.lengths))
        if self._shards[-1]["bytes"] >= self._max_shard_bytes:
            self._close_shard()

    def _close_shard(self) -> None:
        self._shard.close()
        self._shard = None
        self.record_bytes += self._shards[-1].pop("bytes")
        epath.Path(self._scratch_file).copy(self._directory / self._shards[-1]["file"], overwrite=True)
        self._scratch_file.unlink()

    def finish(self, name: str) -> tuple[dict, dict[str, dict]]:
        """Writes the arrays and names the shards; returns facts of the split and of its files."""
        if self._shard is not None:
            self._close_shard()
        files = {}
        for index, shard in enumerate(self._shards):
            final = corpus.shard_file(name, self._split, index, len(self._shards))
            (self._directory / shard["file"]).rename(self._directory / final)
            shard["file"] = final
            files[final] = file_facts(self._directory / final)
        arrays = {
            "sentence_lengths": np.frombuffer(self.lengths, np.uint16).astype("<u2"),
            "document_offsets": np.frombuffer(self.document_offsets, np.int64).astype("<i8"),
            "record_offsets": np.frombuffer(self.record_offsets, np.int64).astype("<i8"),
            "token_counts": self._token_counts.astype("<i8"),
        }
        for array_name, values in arrays.items():
            path = self._directory / corpus.array_file(self._split, array_name)
            with path.open("wb") as file:
                np.save(file, values)
            files[path.name] = file_facts(path)
        facts = {
            "documents": len(self.document_offsets) - 1,
            "sentences": len(self.lengths),
            "tokens": self._tokens,
            "records": len(self.record_offsets) - 1,
            "unknown_tokens": self._unknown,
            "text_bytes": self._text_bytes,
            "shards": self._shards,
        }
        return facts, files


def claim_directory(directory: epath.Path) -> None:
    """Makes a directory ours: new, empty, or left by an unfinished build, which is cleared.

    Raises:
      UserError: it holds anything else.
    """
    if directory.exists():
        if not directory.is_dir():
            raise UserError(f"{directory}: is a file; choose another --out")
        if (directory / corpus.MANIFEST).exists():
            raise UserError(f"{directory}: already holds a corpus; choose another --out or remove it first")
        if (directory / corpus.INCOMPLETE).exists():
            directory.rmtree()
        elif any(directory.iterdir()):
            raise UserError(f"{directory}: is not empty and holds no corpus; choose another --out")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / corpus.INCOMPLETE).write_text("bert-data build was here and has not finished\n")


def file_facts(path: epath.Path) -> dict:
    """SHA-256 and size of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
    return {"sha256": digest.hexdigest(), "bytes": size}


def _parts(sentence_lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Cuts a document into records of at most MAX_RECORD_TOKENS, and longer sentences into several."""
    limit = corpus.MAX_RECORD_TOKENS
    part, size = [], 0
    for length in sentence_lengths.tolist():
        pieces = [limit] * (length // limit) + [length % limit] * (length % limit > 0)
        for piece in pieces:
            if size + piece > limit:
                yield np.array(part)
                part, size = [], 0
            part.append(piece)
            size += piece
    yield np.array(part)


def _features(vocab_size: int) -> tfds.features.FeaturesDict:
    def raw(dtype):
        return tfds.features.Tensor(shape=(None,), dtype=dtype, encoding="bytes")

    return tfds.features.FeaturesDict(
        {
            "document": np.int64,
            "part": np.int32,
            "tokens": raw(corpus.token_dtype(vocab_size).type),
            "sentence_ends": raw(np.uint16),
        }
    )
