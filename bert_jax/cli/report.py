"""The command ``bert-jax report``."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from bert_jax.errors import UserError
from bert_jax.field_validation import NonNegative
from bert_jax.report import Section, text
from bert_jax.storage.paths import check_reachable, to_path

STUDY = "study.json"
"""File in the directory of a study."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report on a run, on several runs side by side, on seeds of a fine-tuning, or on a study: as a page or as text.

    The page needs no other files, no script and no network; its figures need matplotlib (the extra `plot`).
    """

    workdirs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="WORKDIR")]
    """Directory of a run, of a fine-tuning with --seeds, or of a study; several runs are compared with the first."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """HTML page to write; an older page is replaced, no other file. Default: print the report as text."""
    text: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """Text with [MASK] for the samples of filled masks; may be repeated. Default: four short sentences."""
    samples: bool = True
    """Load each run's newest checkpoint, and fill the masks of a few texts."""
    price_per_chip_hour: NonNegative | None = None
    """Price of a chip per hour in any currency, for the cost of a run so far and to its end. Default: unknown."""

    def run(self) -> None:
        """Print the report, or write the page."""
        if self.text and not self.samples:
            raise UserError("--text and --no-samples contradict each other: give one")
        if self.out is None:
            print(text.render(self._sections()))
            return
        from bert_jax.report.page_file import check_page_file, write_page  # jinja2 is loaded only if needed

        check_page_file(self.out, "--out")
        write_page(self.out, "--out", self._sections())
        print(f"wrote {self.out}")

    def _sections(self) -> list[Section]:
        directories = [to_path(directory) for directory in self.workdirs]
        for directory in directories:
            check_reachable(directory)
        studies = [directory for directory in directories if (directory / STUDY).exists()]
        if len(directories) > 1 and studies:
            raise UserError(f"{studies[0]} is a study: give it alone, or only directories of runs")
        if studies:
            if self.text:
                raise UserError("--text is for runs: a study's report has no filled masks; leave it out")
            if self.price_per_chip_hour is not None:
                raise UserError("--price-per-chip-hour is for runs, not for a study: leave it out")
            from bert_jax.experiments import study_report

            return study_report.sections(studies[0])
        from bert_jax.run_report import seeds

        if len(directories) == 1 and seeds.has_seeds(directories[0]):
            if self.price_per_chip_hour is not None:
                raise UserError("--price-per-chip-hour is for single runs: give the directory of one seed")
            return seeds.sections(directories[0])
        from bert_jax.distributed import jax_setup
        from bert_jax.run_report import run_files, sections

        jax_setup.disable_absent_backends()
        texts = (self.text or sections.TEXTS) if self.samples else ()
        return sections.run_sections(run_files.read_runs(directories), texts, self.price_per_chip_hour)
