"""Writes corpora from token ids, with the functions of a build."""

import collections

import numpy as np
from etils import epath

from bert_jax.data.manifest import SPLITS, shard_file, token_dtype
from bert_jax.tokenizers.tokenizer import SPECIAL_TOKENS, Tokenizer, wordpiece
from data_prep.builder import resume, scratch, writer
from data_prep.builder.groups import Group
from data_prep.builder.shards import DocumentPart, ShardWriter
from data_prep.sources.files import file_entry

ENGLISH = Group("a test", "en", None)


class CorpusWriter:
    """Collects documents; `finish` writes the corpus."""

    def __init__(self, directory, name: str, tokenizer: Tokenizer, max_shard_bytes: int = 256 << 20):
        self._directory, self._name, self._tokenizer = epath.Path(directory), name, tokenizer
        self._max_shard_bytes = max_shard_bytes
        self._shards = collections.defaultdict(lambda: [[]])

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, *_):
        pass

    def add(
        self,
        split: str,
        tokens: np.ndarray,
        sentence_lengths: np.ndarray,
        text_bytes: int,
        group: Group = ENGLISH,
    ) -> None:
        """Adds one document; a shard ends with the document that fills it."""
        dtype, shards = token_dtype(self._tokenizer.vocab_size), self._shards[split]
        if sum(part.tokens.nbytes for part in shards[-1]) >= self._max_shard_bytes:
            shards.append([])
        unknown = int((tokens == self._tokenizer.unk_id).sum()) * text_bytes // len(tokens)
        part = DocumentPart(tokens.astype(dtype), sentence_lengths, text_bytes, unknown, "a test", group)
        shards[-1].append(part)

    def finish(self, report: dict) -> dict:
        """Writes the corpus; `report` is the content of corpus.json besides the counts."""
        scratch_dir = resume.scratch_place(self._directory, self._name, None)
        resume.make_scratch_directory(scratch_dir, self._directory)
        for split in SPLITS:
            document, shards = 0, self._shards[split]
            for index, parts in enumerate(shards):
                target = self._directory / shard_file(self._name, split, index, len(shards))
                with ShardWriter(self._tokenizer.begins_word, self._tokenizer.unk_id, document) as shard:
                    for part in parts:
                        shard.add_document([part])
                    arrays, counts = shard.finish(target)
                counts |= {"file": target.name} | file_entry(target)
                scratch.write_arrays(scratch_dir / scratch.shard_marker_name(split, index), arrays, counts)
                document += len(parts)
        manifest = writer.finish_corpus(
            self._directory, scratch_dir, self._name, self._tokenizer, report, [], lambda _: ""
        )
        scratch_dir.rmtree()
        return manifest


EMPTY_REPORT = {"dropped": {}, "cleaned": {}, "skipped": {}, "settings": {}, "sources": []}


def write_sample(directory, seed: int = 0) -> None:
    """Two shards of train, one of validation: 17 files. Documents of 1 to 5 sentences, one of them in three records."""
    rng = np.random.default_rng(seed)
    pieces = (f"{'##' * (i % 2)}word{i}" for i in range(15))
    tokenizer = wordpiece([*SPECIAL_TOKENS, *pieces], lowercase=True, origin="test")
    with CorpusWriter(directory, directory.name, tokenizer, max_shard_bytes=40_000) as writer:
        for document in range(60):
            lengths = np.full(2500, 8) if document == 20 else rng.integers(1, 9, document % 5 + 1)
            if document == 35:
                lengths[0] = 100
            tokens = rng.integers(5, 20, lengths.sum())
            if document == 30:
                tokens[:3] = tokenizer.unk_id
            writer.add("validation" if document % 10 == 9 else "train", tokens, lengths, int(lengths.sum()) * 4)
        writer.finish(EMPTY_REPORT)
