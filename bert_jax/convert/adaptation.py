"""Continued pretraining: a model on text of a domain, scored before and after on the domain and on general text.

Gururangan et al. 2020 ("Don't Stop Pretraining") call it domain-adaptive pretraining. The learning rate is warmed up
and decayed again, and a share of general text is replayed against forgetting (Ibrahim et al. 2024).
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import numpy as np
from jax.sharding import Mesh
from scipy import special

from bert_jax.config import Config
from bert_jax.convert.formats import input_formats
from bert_jax.convert.init_from import load_initial_params
from bert_jax.data import mixture as mixture_lib
from bert_jax.data.corpus import Corpus
from bert_jax.data.mixture import CorpusWeight
from bert_jax.distributed.agreement import is_first
from bert_jax.errors import UserError, require
from bert_jax.objectives.objectives import TOKEN_OBJECTIVES
from bert_jax.provenance import Provenance, make_provenance
from bert_jax.report import Note, Section, Table
from bert_jax.report.text import render
from bert_jax.storage.files import write_atomic
from bert_jax.storage.json_files import read_json_as
from bert_jax.storage.paths import StoredPath, to_path
from bert_jax.training.eval_metrics import BASELINES, mean_difference
from bert_jax.training.job import has_checkpoint, intact_checkpoint, params_and_phase
from bert_jax.training.loop import Progress
from bert_jax.training.pretraining import evaluate_model
from bert_jax.training.programs import Programs
from bert_jax.training.run_directory.environment import describe_environment
from bert_jax.training.run_directory.goodput import trained_by
from bert_jax.training.run_directory.workdir import read_run
from bert_jax.training.sharding import put_equal
from bert_jax.training.shared_programs import SharedPrograms
from bert_jax.training.state import InitialParams
from bert_jax.training.task import Params, Task

RESULTS, INITIAL_FILE = "results.json", "initial_parameters.json"
INITIAL = "initial parameters"
"""Name of the hash of the initial parameters in a provenance."""
WARMUP_SHARE = 0.06
"""Of the steps, by default (Gururangan et al. 2020, appendix B)."""
METRICS = tuple(f"{of}_{kind}" for of in (*TOKEN_OBJECTIVES, "rtd") for kind in ("loss", "accuracy"))
"""Those of the table; a run has those of masked or of causal language modelling, or those of both models of
replaced-token detection."""
MIN_GROUPS = 10
"""Fewer batches of rows have no interval."""
Sums = dict[str, tuple[float, float]]
"""By metric: total and weight."""


class _Initial(TypedDict):
    """The content of initial_parameters.json."""

    sha256: str


class _Results(TypedDict):
    """The content of results.json, as far as it is checked."""

    texts: list[dict[str, Any]]
    provenance: Provenance


class AdaptationCorpora(NamedTuple):
    """The corpora of a run."""

    domain: list[CorpusWeight]
    general: list[CorpusWeight]

    def by_role(self) -> list[tuple[str, CorpusWeight]]:
        """Every corpus with its role, `domain` or `general`."""
        return [(role, part) for role, parts in self._asdict().items() for part in parts]


class TextScore(NamedTuple):
    """Held-out metrics of one corpus."""

    name: str
    rows: int
    metrics: dict[str, float]
    groups: list[Sums]
    """Of each batch of rows."""
    group_rows: int
    """Rows of a batch."""


class Change(TypedDict):
    """A metric of one corpus before and after."""

    baseline: float | None
    before: float
    after: float
    change: float
    interval: float | None
    """Half of the width of a 95 % interval of the change; None: too few batches of rows."""


def check_corpora(texts: AdaptationCorpora) -> None:
    """Check that both splits of all corpora are there, and that no general corpus is a domain corpus.

    Raises:
      UserError: they are not, or the same corpus is given twice.
    """
    opened = {}
    for role, parts in texts._asdict().items():
        require(bool(parts), f"no {role} corpus is given: add --{'corpus' if role == 'domain' else role} DIR")
        opened[role] = mixture_lib.open_corpora(parts, "validation")[1]
    domain = {corpus.identity: corpus for corpus in opened["domain"]}
    for corpus in opened["general"]:
        if (same := domain.get(corpus.identity)) is not None:
            raise UserError(
                f"--general {corpus.directory} is the same corpus as --corpus {same.directory}: forgetting is measured "
                "on other text; build a corpus of text like that of the model's first pretraining"
            )


def training_mixture(texts: AdaptationCorpora, replay: float, exponent: float) -> list[CorpusWeight]:
    """The corpora of the training stream with their shares.

    Args:
      texts: the corpora; within domain and general text their weights decide, or else their sizes.
      replay: share of rows from general text, in [0, 1).
      exponent: `DataConfig.mixture_exponent`.
    """
    mixture = []
    for parts, share in ((texts.domain, 1 - replay), (texts.general, replay)):
        if share > 0:
            parts, corpora = mixture_lib.open_corpora(parts)
            shares = mixture_lib.resolve_shares(parts, [corpus.num_tokens for corpus in corpora], exponent)
            mixture += [CorpusWeight(part.directory, share * of) for part, of in zip(parts, shares, strict=True)]
    return mixture


def run_config(
    config: Config, source: StoredPath, given: Collection[str], texts: AdaptationCorpora, replay: float, epochs: float
) -> Config:
    """The config of the run: the source's model, and a schedule for passes over the domain's text.

    Args:
      config: that of the command.
      source: any model that `bert-jax convert` reads.
      given: dotted names of the fields of `config` that the user set; all others of the model are the source's.
      texts: the corpora.
      replay: as of `training_mixture`.
      epochs: passes over the domain's tokens; not used if phases.0.steps is given.

    Raises:
      UserError: the source cannot be read, has no MLM head although it is to predict tokens, or no room for the rows.
    """
    with input_formats.open_model(source) as source_model:
        model, heads = source_model.model.config, source_model.model.heads
    if config.objective.token == "mlm" and not heads.mlm:
        is_discriminator = heads.task is not None and heads.task.kind == "replaced"
        advice = (
            "give its generator, or continue both with --objective.token rtd --objective.mask-token-share 0.85 "
            "--objective.random-token-share 0 --start.generator GENERATOR (a run has its own)"
        )
        advice = advice if is_discriminator else "give a model that was saved with it"
        raise UserError(f"{source} has no head for masked language modelling to continue with: {advice}")
    own = [name.removeprefix("model.") for name in given if name.startswith("model.")]
    model = dataclasses.replace(model, **{name: getattr(config.model, name) for name in own})
    if config.start.embeddings == "transfer" and "vocab_size" not in own:
        model = dataclasses.replace(model, vocab_size=mixture_lib.vocab_size(texts.domain))
    phase = config.phases[0]
    steps = phase.steps
    if "phases.0.steps" not in given:
        tokens = sum(Corpus.open(part.directory).num_tokens for part in texts.domain)
        steps = max(1, round(epochs * tokens / ((1 - replay) * phase.batch_size * phase.seq_len)))
    warmup = phase.warmup_steps if "phases.0.warmup_steps" in given else round(WARMUP_SHARE * steps)
    decay_start = phase.decay_start if "phases.0.decay_start" in given else min(warmup, steps - 1)
    phase = dataclasses.replace(phase, steps=steps, warmup_steps=warmup, decay_start=decay_start)
    start = dataclasses.replace(config.start, source=str(source))
    return dataclasses.replace(config, model=model, phases=(phase, *config.phases[1:]), start=start)


class _RecordingPrograms(SharedPrograms):
    """Programs that also store the sums of every evaluation batch."""

    def __init__(self, task: Task, mesh: Mesh, made: dict[Any, Any]):
        super().__init__(task, mesh, made)
        self.groups: list[Sums] = []
        self.group_rows = 0

    def evaluate(self, params: Params, phase: int) -> dict[str, float]:
        """As of `Programs`."""
        score, self.group_rows = self.scorer(params, phase)

        def record(batch: dict[str, np.ndarray]) -> tuple[Any, Any]:
            prepared, sums = score(batch)
            self.groups.append({name: (float(sums[name][0]), float(sums[name][1])) for name in METRICS if name in sums})
            return prepared, sums

        return self.task.in_phase(phase).evaluate(record, self.group_rows)


class Scorer:
    """Scores models of one config on corpora, each for itself, with compiled programs that they share."""

    def __init__(self, config: Config, texts: AdaptationCorpora):
        """Compiles nothing yet.

        Args:
          config: of the run.
          texts: whose validation splits are scored.

        Raises:
          UserError: see `mixture.common_tokenizer`.
        """
        self._config, self._texts, self._made = config, texts, {}
        corpora = [Corpus.open(part.directory) for _, part in texts.by_role()]
        self._tokenizer = mixture_lib.common_tokenizer(corpora, config.model.vocab_size)

    def read_initial(self) -> InitialParams:
        """The initial parameters of the run; errors as of `init_from.load_initial_params`."""
        return load_initial_params(self._config, self._tokenizer)

    def score_initial(self, initial: InitialParams) -> list[TextScore]:
        """The scores of a run's initial parameters."""
        source = to_path(str(self._config.start.source))

        def load(programs: Programs) -> tuple[Params, int]:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, programs.abstract_state(0).params)
            return put_equal(initial.params, shardings, str(source)), 0

        return self._score(load, source)

    def score_run(self, directory: StoredPath) -> list[TextScore]:
        """The scores of a run's newest checkpoint, on the same rows: also if the run began with other settings of
        evaluation, which config.json keeps.
        """
        checkpoint = intact_checkpoint(directory)
        return self._score(lambda programs: params_and_phase(programs, checkpoint), directory)

    def _score(self, load: Callable[[Programs], tuple[Params, int]], name: StoredPath) -> list[TextScore]:
        scores = []
        for _, part in self._texts.by_role():
            made: list[_RecordingPrograms] = []

            def make(task: Task, mesh: Mesh, made: list[_RecordingPrograms] = made) -> Programs:
                made.append(_RecordingPrograms(task, mesh, self._made))
                return made[0]

            result = evaluate_model(self._config, self._tokenizer, load, name, [part], make_programs=make)
            validation = made[0].task.validation
            rows = validation.count(validation.corpora[0], result.seq_len, result.rows)
            found = result.metrics, made[0].groups, made[0].group_rows
            scores.append(TextScore(validation.corpora[0].corpus.name, rows, *found))
        return scores


def compare(before: TextScore, after: TextScore) -> dict[str, Change]:
    """The change of every metric of a corpus, with intervals of paired differences over batches of rows."""
    changes = {}
    for name in METRICS:
        if name in before.metrics:
            pairs = [(one[name], other[name]) for one, other in zip(before.groups, after.groups, strict=True)]
            values = before.metrics[name], after.metrics[name]
            changes[name] = Change(
                baseline=_baseline(name, before.metrics),
                before=values[0],
                after=values[1],
                change=values[1] - values[0],
                interval=half_interval(pairs),
            )
    return changes


def _baseline(name: str, metrics: Mapping[str, float]) -> float | None:
    """A metric of the best constant: token frequencies; for a discriminator, the share of replaced tokens."""
    if name in ("rtd_loss", "rtd_accuracy"):
        shares = np.array((metrics["rtd_replaced"], 1 - metrics["rtd_replaced"]))
        return float(special.entr(shares).sum() if name == "rtd_loss" else shares.max())
    return metrics.get(BASELINES[name][0]) if name in BASELINES else None


def half_interval(pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> float | None:
    """Half of the 95 % interval of Student's t of the difference of two weighted means over groups.

    Args:
      pairs: for each group (total, weight) of both sides, whose weights are equal: they are scored on the same targets.

    Returns:
      None for fewer than `MIN_GROUPS` groups of a weight.
    """
    rows = np.array([(after - before, weight) for (before, weight), (after, _) in pairs if weight], np.float64)
    return None if len(rows) < MIN_GROUPS else special.stdtrit(len(rows) - 1, 0.975) * mean_difference(*rows.T)[1]


def results(
    config: Config,
    texts: AdaptationCorpora,
    replay: float,
    progress: Progress,
    before: list[TextScore],
    after: list[TextScore],
) -> dict[str, Any]:
    """What a run gained and lost, as plain values: the content of results.json."""
    return {
        "source": config.start.source,
        "embeddings": config.start.embeddings,
        "seed": config.seed,
        "steps": progress.cursor.step,
        "tokens_seen": progress.tokens_seen,
        "replay": replay,
        "seq_len": config.phases[-1].seq_len,
        "group_rows": before[0].group_rows,
        "texts": [
            {"role": role, "corpus": one.name, "rows": one.rows, "metrics": compare(one, other)}
            for (role, _), one, other in zip(texts.by_role(), before, after, strict=True)
        ],
    }


def check_initial(directory: StoredPath, source: object, sha256: str) -> None:
    """Check that a run with a checkpoint began with the initial parameters of this hash, as far as it has recorded it.

    Raises:
      UserError: `source` has others now, so its scores would not be those before the run's first step.
    """
    path = directory / INITIAL_FILE
    if not has_checkpoint(directory) or not path.exists():
        return
    saved = read_json_as(path, _Initial, "remove it")
    require(
        saved["sha256"] == sha256,
        f"{source} has other parameters than those that the run in {directory} began with: restore it, or choose "
        f"another --workdir (to score the run against it anyway, remove {path})",
    )


def write_initial(directory: StoredPath, sha256: str) -> None:
    """Write what `check_initial` reads; the first process does, before the first step."""
    write_atomic(directory / INITIAL_FILE, json.dumps(_Initial(sha256=sha256)).encode())


def write_results(directory: StoredPath, values: dict[str, Any], sha256: str) -> None:
    """Write results.json with the provenance of the run and the hash of its initial parameters; process 0 does."""
    if is_first():
        run = read_run(directory)
        hashes = {INITIAL: sha256}
        hashes |= {f"corpus {number}": corpus for number, corpus in enumerate(run["corpora"], 1)}
        made = make_provenance(
            describe_environment(),
            hashes=hashes,
            configs={"run": run["config"]},
            made_by={"run": trained_by(directory)},
        )
        write_atomic(directory / RESULTS, (json.dumps(values | {"provenance": made}, indent=1) + "\n").encode())


def read_results(directory: StoredPath) -> dict[str, Any]:
    """The content of results.json.

    Raises:
      UserError: it is damaged.
    """
    return read_json_as(directory / RESULTS, _Results, "run bert-jax adapt again")


def summary(values: dict[str, Any]) -> str:
    """The table of `results`."""
    rows = []
    for text in values["texts"]:
        label = f"{text['role']}: {text['corpus']} ({text['rows']:,} rows)"
        for name, one in text["metrics"].items():
            baseline = "" if one["baseline"] is None else f"{one['baseline']:.4f}"
            interval = "" if one["interval"] is None else f" ±{one['interval']:.4f}"
            numbers = baseline, f"{one['before']:.4f}", f"{one['after']:.4f}", f"{one['change']:+.4f}{interval}"
            rows.append((f"{label} {name}", *numbers))
    start = {"keep": "the source", "transfer": "the source with transferred embeddings"}
    masked = "" if any("causal_loss" in text["metrics"] for text in values["texts"]) else "15 % of them masked, "
    note = (
        f"Before: {start.get(values['embeddings'], 'the source with new embeddings')}. After: "
        f"{values['tokens_seen']:,} tokens in {values['steps']:,} steps, {values['replay']:.0%} of the rows from "
        f"general text. The change on general text is the forgetting. Rows of {values['seq_len']} tokens, {masked}"
        f"the same before and after. One seed; ± is a 95 % interval over groups of {values['group_rows']} "
        f"rows, without the variance of training; fewer than {MIN_GROUPS} groups have none."
    )
    table = Table(("held out", "baseline", "before", "after", "change"), tuple(rows))
    return render([Section("continued pretraining", [table, Note(note)])])
