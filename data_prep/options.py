"""Every choice of a build that decides the corpus' bytes."""

import dataclasses

from bert_jax.errors import UserError
from data_prep.clean import Cleaning


@dataclasses.dataclass(frozen=True)
class NearDuplicates:
    """How documents that are nearly the same are found (MinHash; see `minhash`)."""

    shingle_words: int = 3
    """words of a shingle"""
    threshold: float = 0.5
    """documents at least this similar (Jaccard similarity of their shingles) count as the same"""
    permutations: int = 128
    """numbers of a signature; the error of an estimated similarity falls with its square root"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a build does with its text."""

    language: str = "en"
    """ISO 639 code, for the end of sentences"""
    cleaning: Cleaning = dataclasses.field(default_factory=Cleaning)
    drop_repeated_lines: bool = False
    """within a document, or within 2 million characters of a longer one"""
    min_characters: int = 1
    """shorter documents are left out; counted after cleaning"""
    drop_duplicate_documents: bool = True
    """equal to an earlier one up to whitespace"""
    drop_duplicate_paragraphs: int | None = None
    """paragraphs of at least so many bytes that are equal to an earlier one, of any document, are left out"""
    near_duplicates: NearDuplicates | None = None
    leak_words: int = 13
    """documents that share this many words in a row with an evaluation text are left out"""
    validation_fraction: float = 0.01
    """expected share of documents held out, in (0, 1)"""
    max_shard_bytes: int = 64 << 20
    """a shard is full once its tokens, uncompressed, have this size"""

    def __post_init__(self):
        near = self.near_duplicates
        if near and not 0 < near.threshold <= 1:
            raise UserError(f"the similarity of near-duplicates must lie in (0, 1], not {near.threshold}")
        if not 0 < self.validation_fraction < 1:
            raise UserError(f"the validation fraction must lie between 0 and 1, not {self.validation_fraction}")

    def to_dict(self) -> dict:
        """The choices as JSON values, for corpus.json."""
        return dataclasses.asdict(self)

    def of_units(self, leak_check: bool) -> dict:
        """The choices that phase 1 depends on, as JSON values; the others can change without preparing again."""
        near = self.near_duplicates
        return {
            "language": self.language,
            "cleaning": dataclasses.asdict(self.cleaning),
            "drop_repeated_lines": self.drop_repeated_lines,
            "paragraph_keys": self.drop_duplicate_paragraphs is not None,
            "signatures": [near.shingle_words, near.permutations] if near else None,
            "leak_words": self.leak_words if leak_check else None,
        }
