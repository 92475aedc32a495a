"""Describes a corpus: `statistics` measures, `report` selects; `text`, `html` and `json_report` render."""

import os
from collections.abc import Mapping

from bert_jax.data.corpus import Corpus
from data_prep.inspection import report, statistics, text


def counts(manifest: Mapping) -> str:
    """Counts and removed text, as text; `manifest` is the content of corpus.json."""
    return text.render(report.counts(manifest))


def short_documents(directory: os.PathLike | str) -> str | None:
    """A warning if the documents of a corpus are shorter, on average, than a row of 128; otherwise None."""
    return report.short_documents(statistics.measure_split(Corpus.open(directory)))
