"""The fine-tuning job: read a model and a task's data, train one run per seed, write predictions and results."""

import dataclasses
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.config import MeshConfig
from bert_jax.convert.formats import input_formats
from bert_jax.convert.translate import NativeModel
from bert_jax.distributed.agreement import is_first
from bert_jax.distributed.stop_request import stop_request
from bert_jax.errors import require
from bert_jax.finetune.label_order import in_order_of_task
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.seed_run import FinetuneRun, SeedResult, SourceEncoder
from bert_jax.finetune.split_files import hash_files
from bert_jax.finetune.task_data import TaskData, baseline_score
from bert_jax.finetune.tasks import Splits, check_task, encode_splits, hold_out, open_task, read_splits
from bert_jax.provenance import Code, describe_other_code, make_provenance
from bert_jax.storage.files import write_atomic
from bert_jax.storage.paths import StoredPath
from bert_jax.training.param_paths import params_sha256
from bert_jax.training.run_directory.environment import describe_environment
from bert_jax.training.run_directory.goodput import trained_by
from bert_jax.training.run_directory.workdir import CONFIG, read_config
from bert_jax.training.sharding import make_mesh
from bert_jax.training.shared_programs import MakePrograms, share_programs

RESULTS = "results.json"
_SEED = re.compile(r"seed(0|[1-9][0-9]{0,9})")


class FinetuneResult(NamedTuple):
    """The results of all seeds."""

    task: str
    baseline: float
    """Score of the best constant prediction."""
    seeds: tuple[SeedResult, ...]

    @property
    def scores(self) -> list[float]:
        """Scores of all runs but those that diverged: without failed runs, the mean would be selected on dev."""
        return [one.score for one in self.seeds if np.isfinite(one.score)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with mean and standard deviation over `scores`."""
        scores, tests = self.scores, [one.test_score for one in self.seeds if one.test_score is not None]
        of_test = {f"test_{name}": value for name, value in _mean_and_deviation(tests).items()} if tests else {}
        return {
            "task": self.task,
            "baseline": self.baseline,
            **_mean_and_deviation(scores),
            **of_test,
            "failed": sum(one.failed for one in self.seeds),
            "diverged": len(self.seeds) - len(scores),
            "seeds": [one.to_dict() for one in self.seeds],
        }


def _mean_and_deviation(scores: Sequence[float]) -> dict[str, float | None]:
    return {
        "mean": statistics.fmean(scores) if scores else None,
        "standard_deviation": statistics.stdev(scores) if len(scores) > 1 else None,
    }


def finetune(
    source: StoredPath,
    task: str,
    data_directory: StoredPath,
    workdir: StoredPath,
    options: FinetuneOptions = FinetuneOptions(),  # noqa: B008 (frozen)
    *,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 (frozen)
    announce: Callable[[str], None] = lambda line: None,
    make_programs: MakePrograms | None = None,
) -> FinetuneResult | None:
    """Fine-tune a model on a task, once per seed; the same call continues what was stopped.

    With one seed, `workdir` is the directory of the run; with several, ``seed0`` and so on in it are. Each run has its
    predictions in ``predictions/``; ``results.json`` in `workdir` is written last. Runs that are there already are
    part of the results, whatever their seeds: finished ones are not trained again, others are continued.

    Args:
      source: any model that `bert-jax convert` reads.
      task: a key of `tasks.TASKS`.
      data_directory: with the files of its splits.
      workdir: created if it does not exist.
      options: columns of the data, and the recipe.
      mesh: over the devices of this process.
      announce: called with lines about the data and the recipe, and with the result of each seed.
      make_programs: the programs of a run; None: those of all seeds are shared.

    Returns:
      the results of all seeds; None: SIGTERM stopped a run, which was saved.

    Raises:
      UserError: the source is no encoder with a tokenizer, the data do not have the form of the task, or `workdir`
        holds another run.
    """
    check_task(task)
    encoder = read_source(source)
    data, options = open_task(task, data_directory, options, encoder)
    count, share = data.train.count, options.selection_share
    options = options.with_recipe(count if share is None else count - round(share * count))
    for line in describe(options, data):
        announce(line)
    if options.keep_head:
        require(
            encoder.model.heads.task is not None, f"--keep-head: {source} has no head of a task: leave the flag out"
        )
        model = in_order_of_task(encoder.model, data, source, "leave --keep-head out", announce)
        encoder = encoder._replace(model=model)
    programs = {"mesh": make_mesh(mesh), "make_programs": make_programs or share_programs()}
    splits = None if share is None else _splits_with_selection(task, data_directory, options)

    def make_run(seed: int) -> FinetuneRun:
        nested = None if share is None else encode_splits(task, hold_out(splits, share, seed), options, encoder)[0]
        return FinetuneRun(encoder, task, data, str(data_directory), options, seed, **programs, nested=nested)

    results = train_runs(make_run, workdir, data, options, announce)
    if results is None:
        return None
    result = FinetuneResult(task, baseline_score(data), tuple(results))
    write_results(workdir, result.to_dict(), data, data_directory)
    return result


def _splits_with_selection(task: str, directory: StoredPath, options: FinetuneOptions) -> Splits:
    """The splits, of which `hold_out` can take a part for each seed; raises its errors before the first run."""
    assert options.selection_share is not None
    splits = read_splits(task, directory, options)
    for seed in range(options.seed, options.seed + options.seeds):
        hold_out(splits, options.selection_share, seed)
    return splits


def train_runs(
    make_run: Callable[[int], FinetuneRun],
    workdir: StoredPath,
    data: TaskData,
    options: FinetuneOptions,
    announce: Callable[[str], None],
) -> list[SeedResult] | None:
    """Train one run per seed in `workdir`, or continue them and others that are there; its results are deleted first.

    Args:
      make_run: the run of a seed.
      workdir, options, announce: as in `finetune`.
      data: of the task.

    Returns:
      the results of all seeds; None: SIGTERM stopped a run, which was saved.

    Raises:
      UserError: `workdir` holds another run.
    """
    directories = _directories(workdir, range(options.seed, options.seed + options.seeds))
    first = make_run(options.seed)
    first.check_directories(directories)
    if others := describe_other_code(_code_by_seed(directories)):
        announce(f"note: {workdir} has runs of other code, which are kept: {others}")
    if is_first():
        (workdir / RESULTS).unlink(missing_ok=True)
    return _train_seeds(
        first, make_run, directories, lambda one: announce(f"seed {one.seed}: {_format_result(data, one)}")
    )


def write_results(workdir: StoredPath, results: dict[str, Any], data: TaskData, data_directory: StoredPath) -> None:
    """Write ``results.json`` with the provenance of its runs; the first process does.

    The hashes are those of the model, of the files of the data, and of the encoded examples of each split.
    """
    if not is_first():
        return
    directories = _directories(workdir, range(0))
    config = read_config(next(iter(directories.values())))
    assert config.finetune is not None
    hashes = {"model": config.finetune.source_sha256, "files": hash_files(data_directory), "train": data.train.sha256}
    made = make_provenance(
        describe_environment(),
        hashes=hashes | {name: split.examples.sha256 for name, split in data.splits.items()},
        configs={"run": config},
        made_by=_code_by_seed(directories),
    )
    write_atomic(workdir / RESULTS, (json.dumps(results | {"provenance": made}, indent=1) + "\n").encode())


def _code_by_seed(directories: Mapping[int, StoredPath]) -> dict[str, Code | None]:
    return {f"seed {seed}": trained_by(directory) for seed, directory in directories.items()}


def _train_seeds(
    first: FinetuneRun,
    make_run: Callable[[int], FinetuneRun],
    directories: Mapping[int, StoredPath],
    announce: Callable[[SeedResult], None],
) -> list[SeedResult] | None:
    """The results of all seeds, one after the other; None: SIGTERM stopped a run, which was saved.

    Raises:
      KeyboardInterrupt: after Ctrl-C.
    """
    results = []
    with stop_request() as stop_requested:
        for seed, directory in directories.items():
            run = first if seed == first.seed else make_run(seed)
            if stop_requested():
                if stop_requested.interrupted:
                    raise KeyboardInterrupt(f"stopped before seed {seed}; the same command continues")
                return None
            result = run.train(directory)
            if result is None:
                return None
            results.append(result)
            announce(result)
    return results


def _directories(workdir: StoredPath, seeds: range) -> dict[int, StoredPath]:
    """The directory of each of these seeds, and of each seed with a run in `workdir`.

    It is `workdir` itself for the run that it holds, and for a single seed where there is no run; ``seedN`` for all
    others.

    Raises:
      UserError: `workdir` is for several seeds, and has no run but other files.
    """
    held = read_config(workdir).seed if (workdir / CONFIG).exists() else None
    names = [entry.name for entry in workdir.iterdir()] if workdir.is_dir() else []
    numbered = {int(name[4:]) for name in names if _SEED.fullmatch(name) and (workdir / name / CONFIG).exists()}
    known = numbered if held is None else numbered | {held}
    if not known and len(seeds) == 1 and f"seed{seeds[0]}" not in names:
        return {seeds[0]: workdir}
    if not known:
        _check_directory_of_seeds(workdir, names)
    return {seed: workdir if seed == held else workdir / f"seed{seed}" for seed in sorted(known.union(seeds))}


def _check_directory_of_seeds(workdir: StoredPath, names: Sequence[str]) -> None:
    """Raise UserError if a directory has more than the runs of seeds and their results."""
    others = [name for name in sorted(names) if name != RESULTS and not name.startswith("seed")]
    require(not others, f"work directory {workdir} holds {', '.join(others[:3])}: choose another --workdir for --seeds")


def read_source(source: StoredPath) -> SourceEncoder:
    """Read a model with its tokenizer.

    Raises:
      UserError: no model, no tokenizer, or a causal model.
    """
    with input_formats.open_model(source) as opened:
        tokenizer = opened.loaded_tokenizer
        require(tokenizer is not None, f"{source} has no tokenizer: put its tokenizer.json in its directory")
        model = opened.model._replace(params=jax.tree.map(np.array, opened.model.params))
    require(model.config.direction == "bidirectional", f"{source} is a causal model: fine-tuning needs an encoder")
    return SourceEncoder(model, tokenizer, str(source), native_sha256(model))


def native_sha256(model: NativeModel) -> str:
    """Hex SHA-256 of a model's family, config and parameters."""
    return params_sha256(model.params, json.dumps([model.family, dataclasses.asdict(model.config)]))


def summary_lines(result: FinetuneResult) -> list[str]:
    """The scores of all seeds as a table, with mean, standard deviation and the number of failed runs."""
    values, scores = result.to_dict(), result.scores
    lines = [f"  seed {one.seed:<4} {one.score:8.4f}{_outcome(one)}{_test(one)}" for one in result.seeds]
    lines.append(f"  best constant prediction {result.baseline:.4f}")
    if len(scores) > 1:
        lines.append(
            f"  mean {values['mean']:.4f}, standard deviation {values['standard_deviation']:.4f} of {len(scores)} runs"
        )
    if len(scores) > 1 and "test_mean" in values:
        mean, deviation = values["test_mean"], values["test_standard_deviation"]
        lines.append(f"  test: mean {mean:.4f}, standard deviation {deviation:.4f}")
    if values["failed"]:
        diverged = f", {values['diverged']} of them diverged and have no score" if values["diverged"] else ""
        lines.append(f"  {values['failed']} of {len(result.seeds)} runs failed{diverged}; the mean is of all scores")
    return [f"{result.task}: score", *lines]


def describe(options: FinetuneOptions, data: TaskData) -> Iterator[str]:
    """Lines about the data and the recipe, whose defaults must be filled in."""
    count = data.train.count
    tokens = len(data.train.input_ids)
    held_out = ", ".join(f"{name} {split.examples.count:,}" for name, split in data.splits.items())
    truncated = data.train.truncated
    yield f"data: train {count:,} examples of {tokens / count:.1f} tokens, {truncated:,} truncated; {held_out}"
    epochs = options.steps * options.batch_size / count
    yield (
        f"recipe: {options.steps:,} steps of {options.batch_size} examples ({epochs:.3g} epochs), learning rate "
        f"{options.learning_rate:g}, {options.schedule} after {options.warmup:.0%} warmup, at most "
        f"{options.max_length} tokens"
    )


def _outcome(result: SeedResult) -> str:
    return "  diverged" if result.diverged else "  failed" if result.failed else ""


def _test(result: SeedResult) -> str:
    return "" if result.test_score is None else f"  test {result.test_score:.4f}"


def _format_result(data: TaskData, result: SeedResult) -> str:
    if result.diverged:
        return "diverged, so it has no score"
    shown = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items()) + _test(result)
    return shown + (
        f" (failed: not above {baseline_score(data):.4f}, the best constant prediction)" if result.failed else ""
    )
