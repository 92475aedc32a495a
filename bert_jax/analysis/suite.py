"""What a suite of analyses is: a function from a model and data to plain values, and how they are shown."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import jax

from bert_jax import report
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.model import bert
from bert_jax.storage.paths import StoredPath

Value = TypeVar("Value")
SuiteResult = dict[str, Any]
"""Values that JSON can hold, with names that say what they are and in which unit."""
ITEMS, UNCERTAINTY = "items", "uncertainty"
"""Keys of a result: `ItemScores` by test, which are saved in a file of their own, and what
`item_scores.uncertainty` makes of them."""


class UnsuitedError(UserError):
    """The data have nothing that the suite can use, which its `run` found out: without --suites it is left out."""


class Scalar(NamedTuple):
    """A number of a result that is drawn over checkpoints, and what it is compared with."""

    value: float
    """NaN where it is undefined."""
    baselines: Mapping[str, float] = {}
    """By name, e.g. "random weights"; in the unit of the value."""
    interval: tuple[float, float] | None = None
    """Of 95 %, in the unit of the value; None: not computed."""
    over: str = "items"
    """What the interval is over: items, or seeds of what is a function of training."""
    deviations: Mapping[str, float] = {}
    """Standard deviations over seeds of baselines that are means over several, by name, in the unit of the value."""


@dataclass(frozen=True)
class SuiteInputs:
    """What every suite gets."""

    model: LoadedModel
    data: StoredPath
    """The directory with the data of all suites, each kind in a folder (docs/analysis.md)."""
    seed: int
    """Of everything random: control tasks, random weights, splits."""
    progress: bool
    """Whether progress bars are shown."""
    baselines: dict[Any, Any] = field(default_factory=dict)
    """Measurements of random weights, by `of_random_weights`; the checkpoints of a run share one dict."""

    def files(self, folder: str, *endings: str) -> list[StoredPath]:
        """The files of a folder of the data with one of the endings, by name.

        Raises:
          UserError: there is no such folder or file.
        """
        directory = self.data / folder
        found = sorted(directory.iterdir(), key=str) if directory.is_dir() else []
        found = [path for path in found if path.name.endswith(endings)]
        if not found:
            raise UserError(f"{directory}: the suite needs files {' or '.join(endings)} there (docs/analysis.md)")
        return found

    def with_random_weights(self) -> LoadedModel:
        """The model with random weights from the seed, the baseline of what pretraining has put in."""
        config, heads = self.model.config, self.model.heads
        params = bert.init(config, jax.random.key(self.seed), heads)
        return LoadedModel(config, heads, params, self.model.tokenizer)

    def of_random_weights(self, name: str, measure: Callable[[LoadedModel], Value], seeds: int = 1) -> list[Value]:
        """What `measure` returns for random weights, by seed; the checkpoints of a run with one config compute it once.

        Args:
          name: of the measurement, unique among all suites.
          measure: a function of the weights, the data, the settings of the suite, and the seed.
          seeds: number of seeds of the weights, from `seed` on.
        """
        found = []
        for seed in range(self.seed, self.seed + seeds):
            key = name, seed, self.model.config, self.model.heads
            if key not in self.baselines:
                self.baselines[key] = measure(replace(self, seed=seed).with_random_weights())
            found.append(self.baselines[key])
        return found


class Suite(NamedTuple):
    """A suite, by which `bert-jax analyse` runs it, saves its result and draws its page."""

    name: str
    """As in ``--suites``; its settings are flags ``--NAME.FIELD``."""
    settings: type
    """A frozen dataclass whose fields have defaults and documented units."""
    folders: tuple[str, ...]
    """Folders of the data that it reads; without ``--suites``, suites that lack one are left out."""
    run: Callable[[SuiteInputs, Any], SuiteResult]
    """(inputs, settings) -> the result; may raise `UnsuitedError`."""
    blocks: Callable[[SuiteResult], tuple[report.ReportBlock, ...]]
    """The section of the page about a result."""
    scalars: Callable[[SuiteResult], Mapping[str, Scalar]]
    """Numbers that are drawn over the checkpoints of a run, by name with unit, e.g. "UUAS, best layer (%)"."""
    needs_mlm_head: bool = False
    any_folder: bool = False
    """Whether one of the folders is enough."""
    required: tuple[str, ...] = ()
    """Settings that have no default but ""."""
    unsuited: Callable[[SuiteInputs, Any], str | None] = lambda inputs, settings: None
    """(inputs, settings) -> why the suite cannot run, for what the fields above do not express; None if it can."""

    def obstacle(self, inputs: SuiteInputs, settings: Any) -> str | None:
        """Why the suite cannot run on this model and data with these settings; None if it can."""
        not_given = [f"--{self.name}.{name}" for name in self.required if not getattr(settings, name)]
        if not_given:
            return f"{' and '.join(not_given)} not given"
        if self.needs_mlm_head and not inputs.model.heads.mlm:
            return "the model has no MLM head"
        missing = [folder for folder in self.folders if not (inputs.data / folder).is_dir()]
        if len(missing) == len(self.folders) or (missing and not self.any_folder):
            return f"{inputs.data} has no folder {' or '.join(missing)}"
        return self.unsuited(inputs, settings)
