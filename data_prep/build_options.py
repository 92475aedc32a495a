"""All settings of a build that determine the bytes of the corpus."""

import dataclasses
import math
from typing import Annotated

from bert_jax.errors import require
from bert_jax.field_validation import Count, CountOrZero, Interval, check
from data_prep.clean import CleaningOptions
from data_prep.filters.chain import Filters
from data_prep.filters.function import FilterFunction
from data_prep.filters.personal_data import Kind

_MANIFEST_NAMES = {"decontamination_words": "leak_words"}
"""Settings whose names in corpus.json differ."""


@dataclasses.dataclass(frozen=True)
class NearDuplicateOptions:
    """How near-duplicate documents are found (MinHash; see `minhash`)."""

    shingle_words: int = 3
    """words per shingle"""
    threshold: Annotated[float, Interval("(0, 1]")] = 0.5
    """documents with at least this Jaccard similarity of their shingles are near-duplicates"""
    permutations: int = 128
    """values per signature; the error of the estimated similarity is proportional to 1 / sqrt(permutations)"""

    def __post_init__(self):
        check(self, "near_duplicates.")


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """How a build cleans, filters and splits its text."""

    cleaning: CleaningOptions = dataclasses.field(default_factory=CleaningOptions)
    drop_repeated_lines: bool = False
    """within a document, or within 2 million characters of a longer one"""
    filters: Filters = dataclasses.field(default_factory=Filters)
    filter_functions: tuple[FilterFunction, ...] = ()
    """applied after `filters`"""
    masks: tuple[Kind, ...] = ()
    """personal data that placeholders replace"""
    min_characters: int = 1
    """shorter documents are removed; counted after cleaning"""
    drop_duplicate_documents: bool = True
    """equal to an earlier one except for whitespace"""
    drop_duplicate_paragraphs: int | None = None
    """paragraphs of at least this many bytes that are equal to an earlier one, of any document, are removed"""
    near_duplicates: NearDuplicateOptions | None = None
    decontamination_words: int = 13
    """documents that share this many consecutive words with an evaluation text are removed"""
    score_bounds: tuple[float, ...] = ()
    """the score of a document is the largest of them that is not above it; empty: the largest integer"""
    skip_damaged: bool = False
    """damaged files are left out, see `Source.skip_damaged`"""
    validation_fraction: Annotated[float, Interval("(0, 1)")] = 0.01
    """expected share of documents in the validation split; with four or more, each split has at least two"""
    validation_documents: Count | None = None
    """number of documents in the validation split, instead of a share"""
    validation_sources: CountOrZero = 0
    """the documents of so many sources, the first ones, are the validation split; 0: a share or a number of all"""
    max_shard_bytes: int = 64 << 20
    """a shard is complete once its tokens, uncompressed, have this size"""

    def __post_init__(self):
        check(self, "")
        bounds = self.score_bounds
        require(
            all(map(math.isfinite, bounds)) and list(bounds) == sorted(set(bounds)),
            f"--score-bounds {' '.join(map(str, bounds))}: write finite numbers, each larger than the one before",
        )

    def to_dict(self) -> dict:
        """The settings as JSON values, with the names of corpus.json."""
        settings = dataclasses.asdict(self) | self._filter_settings() | {"score_bounds": list(self.score_bounds)}
        return {_MANIFEST_NAMES.get(name, name): value for name, value in settings.items()}

    @property
    def has_filters(self) -> bool:
        """Whether documents can be removed by `filters` or `filter_functions`."""
        return bool(self.filters.given() or self.filter_functions)

    def _filter_settings(self) -> dict:
        """Those of the families that are applied, and of functions their names and the SHA-256 of their files."""
        return {
            "filters": {name: dataclasses.asdict(family) for name, family in self.filters.given().items()},
            "filter_functions": {function.name: function.sha256 for function in self.filter_functions},
            "masks": list(self.masks),
        }

    def preparation_settings(self, decontaminates: bool) -> dict:
        """The settings that phase 1 depends on, as JSON values; others can change without preparing blocks again."""
        near = self.near_duplicates
        return {
            "cleaning": dataclasses.asdict(self.cleaning),
            "drop_repeated_lines": self.drop_repeated_lines,
            "paragraph_keys": self.drop_duplicate_paragraphs is not None,
            "signatures": [near.shingle_words, near.permutations] if near else None,
            "leak_words": self.decontamination_words if decontaminates else None,
            "score_bounds": list(self.score_bounds),
            **self._filter_settings(),
        }
