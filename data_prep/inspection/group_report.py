"""The sections about languages, and about sources and scores, by which training can sample."""

import collections
from collections.abc import Mapping, Sequence

from bert_jax.data.mixture import smoothed_shares
from bert_jax.report import Note, Section
from bert_jax.report.cells import make_table
from data_prep import languages

_LISTED_LANGUAGES = 20
_LISTED_GROUPS = 100


def sentence_rules_note(splits: Mapping[str, Mapping]) -> str | None:
    """A note on the languages of the splits without rules for sentences, if there are any."""
    counts = count_languages(splits)
    without = sorted((-count["documents"], code) for code, count in counts.items() if not languages.has_rules(code))
    if not without:
        return None
    listed = ", ".join(f"{code} ({-count:,})" for count, code in without[:_LISTED_LANGUAGES])
    more = f" and {len(without) - _LISTED_LANGUAGES} more" if len(without) > _LISTED_LANGUAGES else ""
    return (
        f"{-sum(count for count, _ in without):,} documents are in languages without rules for sentences"
        f" ({listed}{more}): those of a related language, or of English, were used"
    )


def count_languages(splits: Mapping[str, Mapping]) -> dict[str, collections.Counter[str]]:
    """Counts of all splits together, by language; empty for corpora that were built without them."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for split in splits.values():
        for code, count in split.get("languages", {}).items():
            counts[code].update(count)
    return counts


def language_sections(splits: Mapping[str, Mapping], exponent: float | None = None) -> list[Section]:
    """Counts by language, if there are several; with `exponent`, also their shares in training with it."""
    counts = count_languages(splits)
    if len(counts) < 2:
        return []
    total = max(1, sum(count["tokens"] for count in counts.values()))
    columns = {
        "language": "{code}",
        "documents": "{documents:,}",
        "sentences": "{sentences:,}",
        "tokens": "{tokens:,}",
        "share": lambda row: f"{row['tokens'] / total:.2%}",
        **({f"share at {exponent:g}": "{sampled:.2%}"} if exponent is not None else {}),
        "text": "{text_bytes:bytes}",
        "bytes per token": lambda row: f"{row['text_bytes'] / max(1, row['tokens']):.2f}",
        "unknown": lambda row: f"{row['unknown_bytes'] / max(1, row['text_bytes']):.4%}",
        "rules": lambda row: "its own" if languages.has_rules(row["code"]) else "others'",
    }
    rows = sorted(({"code": code, **count} for code, count in counts.items()), key=lambda r: (-r["tokens"], r["code"]))
    if exponent is not None:
        sampled = smoothed_shares([max(1, row["tokens"]) for row in rows], exponent).tolist()
        rows = [row | {"sampled": share} for row, share in zip(rows, sampled, strict=True)]
    about = (
        "Both splits. und: not determined. Rules: of sentence splitting; languages without their own have those of a"
        " related language, or of English. Unknown: share of the bytes of text."
    )
    if exponent is not None:
        about += (
            f" Share at {exponent:g}: of the tokens of an epoch with --data.language-exponent {exponent:g}; random"
            " segments of sentence pairs are drawn by document."
        )
    return [Section("Languages", (Note(about), make_table(rows, columns)))]


def group_sections(groups: Sequence[Mapping]) -> list[Section]:
    """Tokens of train by source, language and score, if there are several sources or scores."""
    if len({(group["source"], group["score"]) for group in groups}) < 2:
        return []
    total = sum(group["tokens"] for group in groups)
    columns = {
        "source": "{source}",
        "language": "{language}",
        "score": lambda row: "" if row["score"] is None else f"{row['score']:g}",
        "documents": "{documents:,}",
        "tokens": "{tokens:,}",
        "share": lambda row: f"{row['tokens'] / total:.2%}",
    }
    if all(group["score"] is None for group in groups):
        del columns["score"]
    about = "Of train. Training can weight them: --data.source-weights, --data.language-weights, --data.score-weights."
    rows = sorted(groups, key=lambda group: -group["tokens"])[:_LISTED_GROUPS]
    more = f" The {_LISTED_GROUPS} largest of {len(groups):,}." if len(groups) > _LISTED_GROUPS else ""
    return [Section("Sources, languages and scores", (Note(about + more), make_table(rows, columns)))]
