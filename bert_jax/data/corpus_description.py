"""What a run keeps of each of its corpora, for the card of its model: a corpus may be gone when that is written."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import TypedDict

from bert_jax.data.manifest import MANIFEST, REBUILD, StoredCount, identity_of, read_manifest
from bert_jax.errors import UserError
from bert_jax.field_validation import from_json
from bert_jax.storage.paths import StoredPath, to_path

UNDETERMINED = "und"
"""ISO 639-2 code of a document whose language is not known."""
NOT_STATED = "not stated"
"""In place of a license."""
_LANGUAGE_SHARE = 0.01
"""Of the tokens; rarer languages are not in the header of a card."""


class GroupDescription(TypedDict):
    """Documents of one source, language and score, of the train split."""

    source: str
    language: str
    score: float | None
    tokens: StoredCount


class _AddedLater(TypedDict, total=False):
    groups: list[GroupDescription]
    """empty for corpora that were built without them; runs that were begun by older versions lack it"""


class CorpusDescription(_AddedLater):
    """A corpus; counts are those of its train split, unless they are of removed documents."""

    name: str
    documents: StoredCount
    tokens: StoredCount
    languages: dict[str, StoredCount]
    """tokens by code; empty for corpora that were built without counting them"""
    licenses: list[str | None]
    """of its sources, each once; None: not stated"""
    filters: list[str]
    """names of families of rules, and of functions"""
    masks: list[str]
    """kinds of personal data that placeholders replace"""
    removed: dict[str, StoredCount]
    """documents by reason, of all splits"""


class _Source(TypedDict, total=False):
    license: str | None


class _Settings(TypedDict, total=False):
    filters: dict[str, dict]
    filter_functions: dict[str, str]
    masks: list[str]


class _Report(TypedDict, total=False):
    """The part of corpus.json that says where the corpus comes from."""

    dropped: dict[str, dict[str, StoredCount]]
    settings: _Settings
    sources: list[_Source]


def describe_corpora(paths: Iterable[str]) -> dict[str, CorpusDescription]:
    """Descriptions by identity; what is no corpus, such as the tables of a fine-tuning task, has none."""
    descriptions = {}
    for path in paths:
        with contextlib.suppress(UserError, OSError):
            directory = to_path(path)
            manifest = read_manifest(directory)
            if "train" in manifest["splits"]:
                descriptions[identity_of(directory, manifest)] = _describe(directory / MANIFEST, manifest)
    return descriptions


def _describe(file: StoredPath, manifest: dict) -> CorpusDescription:
    about = from_json(_Report, manifest, file, REBUILD)
    train, settings = manifest["splits"]["train"], about.get("settings", {})
    removed = {reason: counts.get("documents", 0) for reason, counts in about.get("dropped", {}).items()}
    return CorpusDescription(
        name=manifest["name"],
        documents=train["documents"],
        tokens=train["tokens"],
        languages={code: counts["tokens"] for code, counts in train.get("languages", {}).items()},
        groups=[{key: group[key] for key in GroupDescription.__annotations__} for group in train.get("groups", ())],
        licenses=list(dict.fromkeys(source.get("license") for source in about.get("sources", ()))),
        filters=[*settings.get("filters", ()), *settings.get("filter_functions", ())],
        masks=settings.get("masks", []),
        removed={reason: count for reason, count in removed.items() if count},
    )


def frequent_languages(tokens: Mapping[str, int]) -> list[str]:
    """Codes of ISO 639, without region and script, of the languages with at least 1 % of the tokens.

    Args:
      tokens: by code of BCP 47.
    """
    least = _LANGUAGE_SHARE * sum(tokens.values())
    frequent = sorted(code for code, count in tokens.items() if count >= least and code != UNDETERMINED)
    return list(dict.fromkeys(code.split("-")[0] for code in frequent))
