"""The sections about filters: what each rule removed, of which sources and languages, and examples."""

import collections
from collections.abc import Mapping

from bert_jax.errors import printable
from bert_jax.report import Excerpt, Note, Section
from bert_jax.report.cells import make_table

_LISTED_GROUPS = 40
_FEW_DOCUMENTS, _NEARLY_ALL = 20, 0.9


def filter_sections(corpus: Mapping) -> list[Section]:
    """Counts, and examples; none for a corpus without filters.

    Args:
      corpus: with `filters` and `sources` as in corpus.json.
    """
    if "filters" not in corpus:
        return []
    filters = corpus["filters"]
    blocks = [_mixed_note(filters), *_rules(filters), *_groups(filters, corpus["sources"])]
    examples = tuple(
        Excerpt(
            printable(f"{rule}: {example['origin']}"), tuple(map(printable, example["text"].split("\n"))), cut=False
        )
        for kind in ("rules", "line_rules")
        for rule, counted in filters[kind].items()
        for example in counted["examples"]
    )
    return [
        Section("Filters", tuple(block for block in blocks if block)),
        *([Section("Examples of what filters removed", examples)] if examples else []),
    ]


def lost_languages_note(corpus: Mapping) -> str | None:
    """A note on languages of which the rules of quality removed nearly all documents; None: there is none."""
    documents, removed = collections.Counter(), collections.defaultdict(collections.Counter)
    for group in corpus.get("filters", {"groups": []})["groups"]:
        documents[group["language"]] += group["documents"]
        for rule, counts in group["removed"].items():
            if not rule.startswith("language."):
                removed[group["language"]][rule] += counts["documents"]
    lost = [
        f"{code} ({sum(rules.values()):,} of {documents[code]:,}, most by {rules.most_common(1)[0][0]})"
        for code, rules in sorted(removed.items())
        if documents[code] >= _FEW_DOCUMENTS and sum(rules.values()) >= _NEARLY_ALL * documents[code]
    ]
    return (
        f"filters removed nearly all documents in {', '.join(lost)}: their thresholds are for English" if lost else None
    )


def _mixed_note(filters: Mapping) -> Note:
    read = sum(group["documents"] for group in filters["groups"])
    mixed = filters["mixed_documents"]
    about = f"The filters read {read:,} documents."
    return Note(f"{about} {mixed:,} of them are in several languages." if mixed else about)


def _rules(filters: Mapping) -> list:
    documents = max(1, sum(group["documents"] for group in filters["groups"]))
    text_bytes = max(1, sum(group["text_bytes"] for group in filters["groups"]))
    columns = {
        "rule": "{rule}",
        "documents": "{documents:,}",
        "of all documents": lambda row: f"{row['documents'] / documents:.2%}",
        "text": "{text_bytes:bytes}",
        "of all text": lambda row: f"{row['text_bytes'] / text_bytes:.2%}",
    }
    line_columns = {"rule for lines": "{rule}", "lines": "{lines:,}", "text": "{text_bytes:bytes}"}
    tables = []
    for kind, kind_columns in (("rules", columns), ("line_rules", line_columns)):
        rows = [{"rule": printable(rule), **counted} for rule, counted in filters[kind].items()]
        if rows:
            tables.append(make_table(rows, kind_columns))
    return tables or [Note("They removed nothing.")]


def _groups(filters: Mapping, sources: list[Mapping]) -> list:
    """Shares by rule, source and language, the largest numbers of documents first."""
    rows = [
        {
            "rule": printable(rule),
            "source": sources[group["source"]]["spec"] if group["source"] < len(sources) else "",
            "language": group["language"],
            "documents": removed["documents"],
            "share": removed["documents"] / max(1, group["documents"]),
        }
        for group in filters["groups"]
        for rule, removed in group["removed"].items()
    ]
    rows.sort(key=lambda row: -row["documents"])
    columns = {
        "rule": "{rule}",
        "source": "{source}",
        "language": "{language}",
        "documents": "{documents:,}",
        "of its documents": "{share:.2%}",
    }
    more = [Note(f"{len(rows) - _LISTED_GROUPS} more.")] if len(rows) > _LISTED_GROUPS else []
    return [make_table(rows[:_LISTED_GROUPS], columns), *more] if rows else []
