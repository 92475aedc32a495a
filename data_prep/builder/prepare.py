"""Phase 1: prepares a block of input: cleans it, splits it into sentences, tokenises and hashes it.

A prepared block depends on the block, the options and the tokenizer alone, so any process may make it, any number of
times.
"""

import dataclasses
import json
import pickle
import zlib
from collections.abc import Iterator

import numpy as np
from etils import epath

from bert_jax.data.manifest import token_dtype
from bert_jax.errors import UserError
from bert_jax.storage.files import make_directory_if_local
from bert_jax.storage.listing import file_sizes
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep import languages, word_hashes
from data_prep.build_options import BuildOptions
from data_prep.builder import scratch
from data_prep.builder.groups import Group, GroupFinder
from data_prep.builder.sentences import split_lines, split_paragraphs, split_sentences
from data_prep.clean import CleaningCounts, clean
from data_prep.duplicates import minhash, text_keys
from data_prep.duplicates.ngram_index import count_hits
from data_prep.filters import personal_data
from data_prep.filters.chain import DocumentFilter
from data_prep.filters.function import FilterFunctionError
from data_prep.sources.base import Document, Input, InputRecord, Skipped, Source, SourceBlock
from data_prep.sources.files import check_unchanged

PART_CHARACTERS = 1 << 21
"""Longer documents are prepared in parts."""
FIRST_PLACES = 10
"""Places that are listed for each reason to skip something."""
FUNCTION_FAILED = "filter_function_failed"
"""The reason of documents that were skipped because a function of the user failed on them."""


@dataclasses.dataclass(frozen=True)
class PrepareJob:
    """What a worker needs to prepare blocks; small and picklable."""

    scratch: str
    sources: tuple[Source, ...]
    keys: tuple[str, ...]
    """of each source, see `scratch`"""
    tokenizer_json: str
    options: BuildOptions
    evaluation_ngrams: str | None
    """file of the scratch directory with the hash table of the n-grams of evaluation texts"""


@dataclasses.dataclass(frozen=True)
class BlockToPrepare:
    """A block to prepare."""

    source: int
    target: str
    """file name of the prepared block"""
    block: SourceBlock


def prepare_input(preparer: "BlockPreparer", source: int, part: int, source_input: Input) -> Iterator[int]:
    """Reads an input and prepares its blocks; yields the size of each block when it is prepared.

    After the last one, the marker of the input records the metadata of all of its blocks.

    Raises:
      UserError: the input cannot be read, or has changed.
    """
    job = preparer.job
    directory, key = epath.Path(job.scratch), job.keys[source]
    record = InputRecord()
    blocks: list[dict] = []
    existing: dict[str, int] = {}
    for block in job.sources[source].read_blocks(source_input, record):
        task = BlockToPrepare(source, scratch.block_file_name(key, part, len(blocks)), block)
        path = directory / task.target
        if len(blocks) % scratch.BLOCKS_TOGETHER == 0:
            make_directory_if_local(path.parent)
            existing = file_sizes(path.parent)
        metadata = scratch.read_metadata(path) if path.name in existing else None  # of an earlier run
        if metadata is None or metadata["checksum"] != block_checksum(block) or is_refused(metadata, job.options):
            metadata = preparer(task)
        blocks.append(metadata)
        yield block.size
    check_unchanged(source_input)
    note = {"blocks": blocks, "input": scratch.fingerprint(source_input), **dataclasses.asdict(record)}
    scratch.write_json(directory / scratch.input_marker_name(key, part), note)


def is_refused(metadata: dict, options: BuildOptions) -> bool:
    """Whether a prepared block lacks documents on which a function failed, which are not to be skipped any more."""
    return FUNCTION_FAILED in metadata["skipped"] and not options.skip_damaged


class _Checksum:
    """A file for pickle that computes the CRC-32 of what is written to it."""

    def __init__(self):
        self.value = 0

    def write(self, data: bytes) -> None:
        self.value = zlib.crc32(data, self.value)


def block_checksum(block: SourceBlock) -> int:
    """CRC-32 of the payload of a block."""
    file = _Checksum()
    pickle.dump(block.payload, file, 5)
    return file.value


class BlockPreparer:
    """Prepares blocks; each worker has one."""

    def __init__(self, job: PrepareJob):
        self.job = job
        self._tokenizer = Tokenizer.from_json(job.tokenizer_json, "the tokenizer")

    def __call__(self, task: BlockToPrepare) -> dict:
        """Writes the prepared block of a task; returns its metadata."""
        name = self.job.evaluation_ngrams
        evaluation_ngrams = scratch.open_array(epath.Path(self.job.scratch) / name) if name else None
        source = self.job.sources[task.source]
        builder = _BlockBuilder(self.job.options, source, evaluation_ngrams, self._tokenizer)
        for item in source.documents(task.block):
            if isinstance(item, Skipped):
                builder.skip(item)
                continue
            try:
                for part in _parts(item):
                    builder.add(part)
            except Exception as error:
                error.add_note(f"while preparing the document at {item.origin}")
                raise
        arrays, metadata = builder.finish()
        metadata["checksum"] = block_checksum(task.block)
        scratch.write_arrays(epath.Path(self.job.scratch) / task.target, arrays, metadata)
        return metadata


def _parts(document: Document) -> Iterator[Document]:
    """A document in parts of at most PART_CHARACTERS, each ending at the best place in its last quarter."""
    text, begin = document.text, 0
    while len(text) - begin > PART_CHARACTERS:
        low, high = begin + PART_CHARACTERS * 3 // 4, begin + PART_CHARACTERS
        ends = (text.rfind(mark, low, high) + len(mark) for mark in ("\n\n", "\n", " "))
        end = next((end for end in ends if end > low), high)
        yield dataclasses.replace(document, text=text[begin:end], begins=document.begins and begin == 0, ends=False)
        begin = end
    yield dataclasses.replace(document, text=text[begin:], begins=document.begins and begin == 0)


def _document_filter(options: BuildOptions) -> DocumentFilter | None:
    if not options.has_filters:
        return None
    return DocumentFilter(options.filters, options.filter_functions, options.masks)


class _BlockBuilder:
    """Collects the prepared parts of documents in a block."""

    def __init__(
        self, options: BuildOptions, source: Source, evaluation_ngrams: np.ndarray | None, tokenizer: Tokenizer
    ):
        self._options = options
        self._find_group = GroupFinder(source, options.score_bounds)
        self._evaluation_ngrams = evaluation_ngrams
        self._tokenizer = tokenizer
        self._cleaned = CleaningCounts()
        self._skipped: dict[str, dict] = {}
        self._repeated = {"lines": 0, "text_bytes": 0}
        self._filter = _document_filter(options)
        self._rules: dict[str, int] = {}
        self._masked = dict.fromkeys(options.masks, 0)
        self._parts: list[tuple] = []  # begins, ends, characters, bytes, n-gram hits, paragraphs, rule
        self._origins: list[str] = []
        self._groups: dict[Group, int] = {}
        self._group_of_part: list[int] = []
        self._keys: list[np.ndarray] = []
        self._signatures: list[np.ndarray] = []
        self._paragraph_keys: list[np.ndarray] = []
        self._paragraph_bytes: list[int] = []
        self._paragraph_sentences: list[int] = []
        self._sentences: list[str] = []
        self._characters = 0
        self._tokens: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._unknown_bytes: list[np.ndarray] = []

    def skip(self, skipped: Skipped) -> None:
        """Counts what a source skipped."""
        entry = self._skipped.setdefault(skipped.reason, {"count": 0, "bytes": 0, "first": []})
        entry["count"] += 1
        entry["bytes"] += skipped.size
        if len(entry["first"]) < FIRST_PLACES:
            entry["first"].append(str(skipped))

    def add(self, part: Document) -> None:
        """Adds a document, or a part of one."""
        options = self._options
        text = clean(part.text, options.cleaning, self._cleaned)
        if options.drop_repeated_lines:
            text = self._without_repeated_lines(text)
        group = self._find_group(part, text)
        rule = None
        if self._filter is not None:
            try:
                text, rule = self._filtered(part, text, group.language)
            except FilterFunctionError as error:
                if not options.skip_damaged:
                    raise UserError(f"{part.origin}: {error}; or add --skip-damaged") from error
                self.skip(Skipped(FUNCTION_FAILED, part.origin, str(error), len(text.encode())))
                return
        is_removed = rule is not None and part.begins and part.ends  # other parts may decide on a part
        if options.masks and not is_removed:
            text = self._with_masks(text)
        if is_removed:
            paragraphs, sentences = [], []
        elif part.sentence_per_line:
            paragraphs = [text] * bool(text)
            sentences = [split_lines(text)] * bool(text)
        else:
            paragraphs = split_paragraphs(text)
            sentences = split_sentences(paragraphs, languages.splitter_code(group.language))
        data = text.encode()
        self._keys.append(text_keys.text_key(data))
        ngram_hits = 0
        if options.near_duplicates or self._evaluation_ngrams is not None:
            hashes = word_hashes.word_hashes(text)
            if self._evaluation_ngrams is not None:
                ngram_hits = count_hits(hashes, options.decontamination_words, self._evaluation_ngrams)
            if options.near_duplicates:
                near = options.near_duplicates
                self._signatures.append(minhash.signature(hashes, near.shingle_words, near.permutations))
        if options.drop_duplicate_paragraphs is not None:
            self._add_paragraph_keys(paragraphs)
        self._paragraph_sentences += [len(paragraph_sentences) for paragraph_sentences in sentences]
        for paragraph_sentences in sentences:
            self._sentences += paragraph_sentences
        self._characters += len(text)
        if self._characters >= PART_CHARACTERS:
            self._tokenize()
        self._origins.append(part.origin)
        self._group_of_part.append(self._groups.setdefault(group, len(self._groups)))
        number = 0 if rule is None else self._rules.setdefault(rule, 1 + len(self._rules))
        self._parts.append((part.begins, part.ends, len(text), len(data), ngram_hits, len(paragraphs), number))

    def _filtered(self, part: Document, text: str, language: str) -> tuple[str, str | None]:
        rest, rule = self._filter(text, language, part.origin)
        return (text if rest == text else clean(rest, self._options.cleaning)), rule

    def _with_masks(self, text: str) -> str:
        text, masked = personal_data.mask(text, self._options.masks)
        for kind, count in masked.items():
            self._masked[kind] += count
        return text

    def _without_repeated_lines(self, text: str) -> str:
        known_lines, kept = set(), []
        for line in text.split("\n"):
            if line and line in known_lines:
                self._repeated["lines"] += 1
                self._repeated["text_bytes"] += len(line.encode()) + 1
            else:
                known_lines.add(line)
                kept.append(line)
        return clean("\n".join(kept), self._options.cleaning)

    def _add_paragraph_keys(self, paragraphs: list[str]) -> None:
        encoded = [paragraph.encode() for paragraph in paragraphs]
        sizes = [len(paragraph) for paragraph in encoded]
        self._paragraph_bytes += sizes
        self._paragraph_keys.append(text_keys.paragraph_keys(b"".join(encoded), np.cumsum(sizes, dtype=np.int64)))

    def _tokenize(self) -> None:
        tokens, lengths = self._tokenizer.encode_corpus(self._sentences)
        self._tokens.append(tokens.astype(token_dtype(self._tokenizer.vocab_size)))
        self._lengths.append(lengths.astype(np.uint32))
        self._unknown_bytes.append(self._tokenizer.unknown_bytes(self._sentences, tokens, lengths))
        self._sentences, self._characters = [], 0

    def finish(self) -> tuple[dict[str, np.ndarray], dict]:
        """The arrays and metadata of the prepared block."""
        self._tokenize()
        lengths = np.concatenate(self._lengths)
        paragraph = np.repeat(np.arange(len(self._paragraph_sentences)), self._paragraph_sentences)
        unknown_bytes = np.bincount(paragraph, np.concatenate(self._unknown_bytes), len(self._paragraph_sentences))
        paragraph = paragraph[lengths > 0]
        begins, ends, characters, text_bytes, ngram_hits, paragraphs, rules = (
            np.array(self._parts, np.int64).reshape(-1, 7).T
        )
        arrays = {
            "tokens": np.concatenate(self._tokens),
            "sentence_lengths": lengths[lengths > 0],
            "paragraph_sentences": np.bincount(paragraph, minlength=len(self._paragraph_sentences)).astype(np.uint32),
            "paragraph_unknown_bytes": unknown_bytes.astype(np.uint32),
            "part_begins": begins.astype(np.uint8),
            "part_ends": ends.astype(np.uint8),
            "part_characters": characters,
            "part_bytes": text_bytes,
            "part_leaks": ngram_hits,
            "part_paragraphs": paragraphs,
            "part_keys": np.array(self._keys),
            "part_origins": scratch.pack_texts(self._origins),
            "part_groups": np.array(self._group_of_part, np.uint32),
            "groups": scratch.pack_texts(map(json.dumps, self._groups)),
        }
        if self._filter:
            arrays["part_rules"] = rules.astype(np.uint16)
        if self._options.near_duplicates:
            arrays["part_signatures"] = np.array(self._signatures)
        if self._options.drop_duplicate_paragraphs is not None:
            arrays["paragraph_keys"] = np.concatenate([np.zeros((0, 2), np.uint64), *self._paragraph_keys])
            arrays["paragraph_bytes"] = np.array(self._paragraph_bytes, np.uint32)
        metadata = {
            "parts": len(self._parts),
            "paragraphs": len(self._paragraph_sentences),
            "skipped": self._skipped,
            "cleaned": dataclasses.asdict(self._cleaned) | {f"{kind}_masks": n for kind, n in self._masked.items()},
            "repeated_lines": self._repeated,
            "undetermined": self._find_group.undetermined,
            "unscored": self._find_group.unscored,
        }
        if self._filter:
            metadata["filtered"] = {"rules": [*self._rules], **self._filter.metadata()}
        return arrays, metadata
