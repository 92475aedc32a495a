"""Phase 3: writes the shards of a corpus, each from its plan and its prepared blocks."""

import dataclasses
import itertools
import operator
from collections.abc import Iterator

import numpy as np
from etils import epath

from bert_jax.data.manifest import shard_file
from bert_jax.storage.paths import is_remote
from data_prep.builder import scratch
from data_prep.builder.groups import unpack_groups
from data_prep.builder.shards import DocumentPart, ShardWriter
from data_prep.sources.files import file_entry

_BLOCK_ARRAYS = (
    "tokens",
    "sentence_lengths",
    "paragraph_sentences",
    "paragraph_unknown_bytes",
    "part_paragraphs",
    "part_bytes",
    "paragraph_bytes",
    "part_origins",
    "part_groups",
    "groups",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Assembler:
    """Writes shards from their plans; small and picklable."""

    scratch: str
    directory: str
    name: str
    begins_word: np.ndarray
    """of the tokenizer, bool [vocab_size]"""
    unk_id: int

    def __call__(self, plan: str) -> None:
        """Writes the shard of a plan and, last, its arrays; does nothing if the arrays exist."""
        directory = epath.Path(self.scratch)
        metadata = scratch.read_metadata(directory / plan)
        done = directory / scratch.shard_marker_name(metadata["split"], metadata["index"])
        target = epath.Path(self.directory) / shard_file(
            self.name, metadata["split"], metadata["index"], metadata["count"]
        )
        if done.exists() and target.exists() and target.stat().length == scratch.read_metadata(done)["bytes"]:
            return
        with ShardWriter(self.begins_word, self.unk_id, metadata["document"], self._temporary()) as writer:
            parts = _parts(directory, metadata["units"], scratch.read_arrays(directory / plan))
            for _, document in itertools.groupby(parts, operator.itemgetter(0)):
                writer.add_document(piece for _, piece in document)
            arrays, counts = writer.finish(target)
        scratch.write_arrays(done, arrays, counts | {"file": target.name} | file_entry(target))

    def _temporary(self) -> str | None:
        """Directory for unfinished shards: the scratch directory, unless it is in an object store."""
        return None if is_remote(self.scratch) else self.scratch


def _parts(directory: epath.Path, blocks: list[str], plan: dict[str, np.ndarray]) -> Iterator[tuple[int, DocumentPart]]:
    """Each kept part, with a number that all parts of a document share; blocks are read one at a time."""
    part = paragraph = 0
    documents = np.cumsum(plan["starts"], dtype=np.int64)
    for block in blocks:
        arrays = scratch.read_arrays(directory / block, _BLOCK_ARRAYS)
        num_parts, num_paragraphs = len(arrays["part_paragraphs"]), len(arrays["paragraph_sentences"])
        repeats = plan.get("paragraph_repeats", np.zeros(0, np.bool_))[paragraph : paragraph + num_paragraphs]
        for index, piece in _pieces(arrays, plan["wanted"][part : part + num_parts], repeats):
            yield documents[part + index], piece
        part, paragraph = part + num_parts, paragraph + num_paragraphs


def _pieces(
    arrays: dict[str, np.ndarray], is_kept: np.ndarray, paragraph_repeats: np.ndarray
) -> Iterator[tuple[int, DocumentPart]]:
    """Index and content of each kept part of a prepared block, without duplicate paragraphs."""
    if not is_kept.any():
        return
    paragraph_ends = np.cumsum(arrays["part_paragraphs"])
    sentence_ends = np.concatenate([[0], np.cumsum(arrays["paragraph_sentences"], dtype=np.int64)])
    token_ends = np.concatenate([[0], np.cumsum(arrays["sentence_lengths"], dtype=np.int64)])
    origins, groups = scratch.unpack_texts(arrays["part_origins"]), unpack_groups(arrays["groups"])
    for index in np.flatnonzero(is_kept):
        last = int(paragraph_ends[index])
        first = last - int(arrays["part_paragraphs"][index])
        sentences = slice(sentence_ends[first], sentence_ends[last])
        lengths = arrays["sentence_lengths"][sentences]
        tokens = arrays["tokens"][token_ends[sentences.start] : token_ends[sentences.stop]]
        text_bytes, unknown_bytes = int(arrays["part_bytes"][index]), arrays["paragraph_unknown_bytes"][first:last]
        if paragraph_repeats[first:last].any():
            text_bytes -= int(arrays["paragraph_bytes"][first:last][paragraph_repeats[first:last]].sum())
            unknown_bytes = unknown_bytes[~paragraph_repeats[first:last]]
            kept = np.repeat(~paragraph_repeats[first:last], arrays["paragraph_sentences"][first:last])
            tokens, lengths = tokens[np.repeat(kept, lengths)], lengths[kept]
        sizes = text_bytes, int(unknown_bytes.sum(dtype=np.int64))
        yield index, DocumentPart(tokens, lengths, *sizes, origins[index], groups[arrays["part_groups"][index]])
