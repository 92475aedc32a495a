"""Checks pipeline options of Beam, which drops with a warning, or without, what its runner does not use."""

import difflib
from collections.abc import Iterator, Sequence

from apache_beam.options import pipeline_options
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.dask.dask_runner import DaskOptions

from bert_jax.errors import UserError

_DEFAULT = "DirectRunner"
_RUNNERS: dict[str, tuple[type[PipelineOptions], ...]] = {
    "DirectRunner": (pipeline_options.DirectOptions,),
    "DataflowRunner": (pipeline_options.GoogleCloudOptions, pipeline_options.WorkerOptions),
    "FlinkRunner": (pipeline_options.FlinkRunnerOptions, pipeline_options.WorkerOptions),
    "SparkRunner": (pipeline_options.SparkRunnerOptions, pipeline_options.WorkerOptions),
    "DaskRunner": (DaskOptions,),
}
"""Options that some runners do not use, by the runners that do"""
_WITHOUT_SERVER = ("DirectRunner", "DataflowRunner", "DaskRunner")
"""Runners that use no other options than those of Beam; a job server has its own"""


def check_flags(runner: str | None, flags: Sequence[str]) -> None:
    """Checks that Beam and its runner use all options.

    Args:
      runner: Beam's name of the runner; None: its default. The options of runners that are not known here are not
        checked.
      flags: as on the command line of Beam.

    Raises:
      UserError: an option would be ignored.
    """
    runner = runner or _DEFAULT
    if runner not in _RUNNERS:
        return
    # Options of Beam are those of the subclasses that exist, so of the runners that were imported.
    known = PipelineOptions([]).get_all_options()
    for option in _options(flags):
        if not option[0].startswith("--"):
            raise UserError(f"-- {option[0]}: not an option of Beam; its options begin with --")
        users = [name for name, kinds in _RUNNERS.items() if any(_has(kind, option) for kind in kinds)]
        if users and runner not in users:
            raise UserError(
                f"-- {option[0]}: {runner} ignores this option, which is for {' and '.join(users)};"
                " remove it, or choose another --runner"
            )
        unknown = set(PipelineOptions(option).get_all_options(retain_unknown_options=True)) - set(known)
        if unknown and runner in _WITHOUT_SERVER:
            near = difflib.get_close_matches(unknown.pop(), known, 1)
            hint = f"; did you mean --{near[0]}?" if near else ""
            raise UserError(f"-- {option[0]}: {runner} has no such option, and would ignore it{hint}")


def _options(flags: Sequence[str]) -> Iterator[list[str]]:
    """Options with their values, which may be words of their own."""
    option: list[str] = []
    for flag in flags:
        if flag.startswith("-") and option:
            yield option
            option = []
        option.append(flag)
    if option:
        yield option


def _has(kind: type[PipelineOptions], option: list[str]) -> bool:
    """Whether an option with a value other than its default is one of a class."""
    return bool(kind(option).get_all_options(drop_default=True, current_only=True))
