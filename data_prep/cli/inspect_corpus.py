"""The command `bert-data inspect`: describes a corpus in the terminal, as JSON, or as an HTML page."""

import json
from dataclasses import dataclass
from typing import Annotated

import tyro
from etils import epath

from bert_jax.errors import UserError
from bert_jax.field_validation import Share
from bert_jax.report import html, text
from bert_jax.storage import write_atomic
from data_prep.cli.arguments import File, Switch
from data_prep.inspection import report
from data_prep.inspection.statistics import measure_corpus, weight_corpora


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Describe corpora: counts, lengths, what was removed, samples, weights for training on several."""

    directories: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="DIR")]
    """A corpus; several are compared and weighted."""
    json: Switch = False
    """Print the same as JSON."""
    html: File | None = None
    """Also write an HTML page with plots; FILE must not exist. Default: none."""
    sampling_exponent: Share = 0.7
    """With several corpora: weights are shares of tokens to this power (multilingual BERT: 0.7)."""

    def run(self) -> None:
        """Print the description, and write the page."""
        page = epath.Path(self.html) if self.html else None
        if page is not None and page.exists():
            raise UserError(f"--html {page}: exists already; choose another file or remove it first")
        if page is not None and not page.parent.is_dir():
            raise UserError(f"--html {page}: there is no directory {page.parent}; make it first")
        corpora = [measure_corpus(directory) for directory in self.directories]
        mixed = weight_corpora(corpora, self.sampling_exponent) if len(corpora) > 1 else None
        sections = report.sections(corpora, mixed)
        if page is not None:
            try:
                write_atomic(page, html.render(sections).encode())
            except OSError as error:
                raise UserError(f"--html {page}: cannot be written ({error.strerror}); choose another file") from error
        if self.json:
            print(json.dumps({"corpora": corpora, "mixture": mixed}, indent=1, ensure_ascii=False))
        else:
            print(text.render(sections))
