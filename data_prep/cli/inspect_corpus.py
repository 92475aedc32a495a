"""The command `bert-data inspect`: describes a corpus in the terminal, as JSON, or as an HTML page."""

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from bert_jax import provenance
from bert_jax.command.flags import DirectoryArg
from bert_jax.field_validation import Share
from bert_jax.report import text
from bert_jax.report.page_file import check_page_file, write_page
from data_prep.cli.arguments import File, Switch
from data_prep.inspection import report
from data_prep.inspection.corpus_statistics import measure_corpus, weight_corpora


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Describe corpora: counts, lengths, what was removed, samples, weights for training on several."""

    directories: Annotated[tyro.conf.Positional[tuple[DirectoryArg, ...]], tyro.conf.arg(metavar="DIR")]
    """A corpus; several are compared and weighted."""
    json: Switch = False
    """Print the same as JSON."""
    html: File | None = None
    """Also write an HTML page with plots; an older page is replaced, no other file. Default: none."""
    sampling_exponent: Share = 0.7
    """Weights of several corpora, or of the languages of one, are shares of tokens to this power (multilingual BERT:
    0.7)."""

    def run(self) -> None:
        """Print the description, and write the page."""
        if self.html is not None:
            check_page_file(self.html, "--html")
        corpora = [measure_corpus(directory) for directory in self.directories]
        mixed = weight_corpora(corpora, self.sampling_exponent) if len(corpora) > 1 else None
        sections = report.sections(corpora, mixed, self.sampling_exponent)
        hashes = {corpus["directory"]: corpus["identity"] for corpus in corpora}
        made = provenance.make_provenance(provenance.package_versions(), hashes=hashes)
        if self.html is not None:
            write_page(self.html, "--html", [*sections, *provenance.sections({"": made})])
        if self.json:
            values = {"corpora": corpora, "mixture": mixed, "provenance": made}
            print(json.dumps(values, indent=1, ensure_ascii=False))
        else:
            print(text.render(sections))
