"""Describes a corpus for a person: `statistics` measures, `report` says what is shown, `text` and `html` show it."""

from collections.abc import Mapping

from data_prep.inspection import report, text


def counts(manifest: Mapping) -> str:
    """Counts, and what was left out, as text; `manifest` is the content of corpus.json."""
    return text.render(report.counts(manifest))
