"""The command ``bert-jax analyse``: suites of analyses on a model, or on every checkpoint of a run.

Layers count from 0 in all names and results; hidden state 0 is the output of the embeddings.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import tyro

from bert_jax.analysis import comparison, page, result_files, viewer
from bert_jax.analysis.suite import UNCERTAINTY, Scalar, Suite, SuiteInputs, UnsuitedError
from bert_jax.analysis.suites import SUITES
from bert_jax.command import flags
from bert_jax.command.flags import DirectoryArg
from bert_jax.convert.formats import run as run_format
from bert_jax.distributed import jax_setup
from bert_jax.errors import UserError, did_you_mean
from bert_jax.field_validation import Seed, Share, check
from bert_jax.inference import loaded_model
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.provenance import make_provenance
from bert_jax.report.page_file import check_page_file, write_page
from bert_jax.storage.files import make_directory_if_local, write_atomic
from bert_jax.storage.lock import DirectoryLock
from bert_jax.storage.paths import StoredPath, check_reachable
from bert_jax.training.run_directory.checkpoint import checkpoint_directory, committed_checkpoint_paths
from bert_jax.training.run_directory.environment import describe_environment

PAGE = "report.html"
CURVES = "curves.json"
"""With several checkpoints: `curves`, values by suite, name and step."""
COMPARED, COMPARISON = "compared", "comparison.json"
"""With --compare: the directory of the other model's results, and `tests`, the list of `PairedTest`."""


@dataclass(frozen=True, kw_only=True)
class AnalyseOptions:
    """Analyse what a model knows, where, and since when; the same command continues a stopped analysis.

    OUT gets a JSON file per suite, with the settings, and one page, report.html, that needs no network.
    """

    model: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="MODEL")]
    """Work directory of a run, an exported model, or any checkpoint that `bert-jax convert` reads."""
    data: DirectoryArg | None = None
    """Directory with the data, each kind in a folder of a fixed name (docs/analysis.md); only --view needs none."""
    out: DirectoryArg
    """Directory of the results."""
    suites: tuple[str, ...] = ()
    """Suites to run. Default: all whose data and heads are there; those left out are named."""
    checkpoints: str = "newest"
    """Of a run: `newest`, `all`, or steps as in 250,500,1000. With several, the page has curves over the steps."""
    compare: Annotated[DirectoryArg | None, tyro.conf.arg(metavar="MODEL")] = None
    """Another model, or another checkpoint of the run: the suites run on it too, and its answers to the same items are
    compared one by one."""
    seed: Seed = 0
    """Of control tasks, random weights and splits."""
    view: tuple[str, ...] = ()
    """A text, or the two texts of a pair: attention.html shows the attention of every head on it."""
    view_heads: tuple[str, ...] = ()
    """LAYER.HEAD, as in 3.7: heads that are written as SVG files, too; the page shows the first of them first."""
    view_least: Share = 0.05
    """Smallest weight that is a line in these SVG files."""
    view_target: str | None = None
    """Token at the first mask of the text, or label: integrated gradients attribute its log-probability or logit to the
    tokens. Default: the one that the model predicts."""
    view_baseline: viewer.Baseline = "mask"
    """What the words of the text are compared with: [MASK] or [PAD] in their places."""
    view_steps: viewer.Steps = 50
    """Points at which the gradient is taken; 0: no attribution."""


@dataclass(frozen=True)
class _Numbers:
    """The fields of AnalyseOptions that have a range."""

    seed: Seed
    view_least: Share
    view_steps: viewer.Steps


def command_type() -> type:
    """AnalyseOptions with the settings of every suite as a field."""
    fields = [
        (_attribute(suite), suite.settings, dataclasses.field(default_factory=suite.settings)) for suite in SUITES
    ]
    namespace = {"__doc__": AnalyseOptions.__doc__, "__module__": __name__}
    options = {"bases": (AnalyseOptions,), "namespace": namespace, "frozen": True, "kw_only": True}
    return dataclasses.make_dataclass("Analyse", fields, **options)


def _attribute(suite: Suite) -> str:
    return suite.name.replace("-", "_")


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
      UserError: a wrong argument, missing or malformed data, or a model that does not suit a suite named in --suites.
    """
    jax_setup.disable_absent_backends()
    options = flags.parse(command_type(), argv, "bert-jax analyse")
    check(options, "--", _Numbers)
    chosen = _chosen_suites(options.suites)
    heads = _heads_to_view(options)
    for path in (options.model, options.data, options.out, options.compare):
        if path is not None:
            check_reachable(path)
    if options.data is not None and not options.data.is_dir():
        raise UserError(f"--data {options.data} is not a directory: give the one with the folders of data")
    _refuse_other_directories(options.out)
    models = list(_checkpoints(options.model, options.checkpoints))
    with DirectoryLock(options.out) as lock:
        lock.acquire()
        if options.data is not None:
            check_page_file(options.out / PAGE, "--out")
        if options.view:
            _write_views(options, heads, models)
        if options.data is not None:
            _run(options, chosen, models)


def _refuse_other_directories(out: StoredPath) -> None:
    """UserError if the results of a run or a study are there: they have a report.html too."""
    for what, is_there in (("run", run_format.matches(out)), ("study", (out / "study.json").exists())):
        if is_there:
            raise UserError(f"--out {out} is the directory of a {what}: give a directory for the analysis alone")


def _heads_to_view(options: AnalyseOptions) -> list[tuple[int, int]]:
    """Layers and heads of --view-heads; UserError if the flags of data and view do not go together."""
    if options.data is None and (options.suites or not options.view):
        raise UserError("bert-jax analyse needs --data DIR, or --view TEXT: `bert-jax analyse --help` explains them")
    for name, given in (("view-heads", options.view_heads), ("view-target", options.view_target)):
        if given and not options.view:
            raise UserError(f"--{name}: give the text with --view")
    if options.view_target and not options.view_steps:
        raise UserError("--view-target needs --view-steps of at least 1")
    if options.compare is not None and (options.data is None or options.checkpoints != "newest"):
        raise UserError(
            "--compare needs --data, and takes the newest checkpoint: leave --checkpoints out, or give one "
            "checkpoint as MODEL, as in runs/first/checkpoints/00001000"
        )
    if len(options.view) > 2:
        raise UserError(f"--view has {len(options.view)} texts: give one or two, each in quotation marks")
    return viewer.parse_heads(options.view_heads)


def _chosen_suites(names: Sequence[str]) -> list[Suite]:
    known = {suite.name: suite for suite in SUITES}
    for name in names:
        if name not in known:
            raise UserError(f"--suites {name}: {did_you_mean(name, known) or 'there are ' + ', '.join(known)}")
    return [suite for suite in SUITES if not names or suite.name in names]


def _checkpoints(model: StoredPath, wanted: str) -> Iterator[tuple[int | None, StoredPath]]:
    """Steps and sources of the models to analyse, ascending."""
    if wanted == "newest":
        yield None, model
        return
    if not run_format.matches(model) or model.parent.name == "checkpoints":
        raise UserError(f"--checkpoints {wanted}: {model} is not a run; give a run's work directory")
    saved = {int(path.name): path for path in committed_checkpoint_paths(checkpoint_directory(model))}
    if wanted != "all" and not all(step.strip().isdecimal() for step in wanted.split(",")):
        raise UserError(f"--checkpoints {wanted}: give newest, all, or steps as in 250,500")
    steps = sorted(saved) if wanted == "all" else sorted({int(step) for step in wanted.split(",")})
    missing = [step for step in steps if step not in saved]
    if missing or not steps:
        there = f"it has those of steps {', '.join(map(str, sorted(saved)))}" if saved else "it has none"
        which = f"no checkpoint {missing[0]}" if missing else "no checkpoint"
        raise UserError(f"--checkpoints {wanted}: {model} has {which}; {there}")
    for step in steps:
        yield step, saved[step]


def _directory(out: StoredPath, step: int | None) -> StoredPath:
    """Of the results of a checkpoint, made if it does not exist."""
    directory = out if step is None else out / f"{step:08d}"
    make_directory_if_local(directory)
    return directory


def _write_views(options: Any, heads: list[tuple[int, int]], models: list[tuple[int | None, StoredPath]]) -> None:
    settings = viewer.AttributionSettings(options.view_target, options.view_baseline, options.view_steps)
    for step, source in models:
        title = f"Attention of {options.model}{'' if step is None else f', step {step:,}'}"
        directory, model = _directory(options.out, step), loaded_model.load(source)
        for path in viewer.write_view(model, directory, title, options.view, heads, options.view_least, settings):
            print(f"wrote {path}")


def _earlier_results(
    directory: StoredPath, chosen: list[Suite], model_digest: str
) -> dict[str, result_files.ResultFile]:
    """Results of the same model and code in the suites that this call does not run: the page shows them too."""
    files = {}
    for suite in SUITES:
        path = directory / f"{suite.name}.json"
        if suite not in chosen and path.exists():
            file = result_files.read(path)
            if file["request"]["model"] != model_digest:
                continue
            if file["request"]["code"] != result_files.code_version(suite):
                text = result_files.other_code_text(path, file)
                print(f"note: {suite.name} is left out: {text}; add it to --suites", file=sys.stderr)
                continue
            files[suite.name] = file
    return files


def _run_suites(
    options: Any, chosen: list[Suite], inputs: SuiteInputs, digest: str, directory: StoredPath, what: str
) -> tuple[dict[str, result_files.ResultFile], dict[str, str]]:
    """The results of a model, whose SHA-256 is `digest`, by suite, and why others were left out."""
    files, left_out = {}, {}
    for suite in chosen:
        settings = getattr(options, _attribute(suite))
        try:
            reason = suite.obstacle(inputs, settings)
            if reason is not None:
                raise UnsuitedError(reason)
            path = directory / f"{suite.name}.json"
            computed = result_files.compute_or_read(path, suite, inputs, settings, digest)
        except UnsuitedError as error:
            if options.suites:
                raise UserError(f"--suites {suite.name}: {error}") from None
            left_out[suite.name] = str(error)
            continue
        files[suite.name] = computed.file
        how = f"{computed.file['seconds']:.1f} s" if computed.is_new else "done before"
        print(f"{suite.name}{what}: {how}", file=sys.stderr)
    return files, left_out


class _Model(NamedTuple):
    """A model and its digest."""

    model: LoadedModel
    digest: str
    """Of `result_files.model_sha256`."""


def _read(source: StoredPath) -> _Model:
    model = loaded_model.load(source)
    return _Model(model, result_files.model_sha256(model))


def _compare(
    options: Any,
    chosen: list[Suite],
    model: LoadedModel,
    files: Mapping[str, result_files.ResultFile],
    other: _Model,
) -> list[comparison.PairedTest]:
    """The tests of the model, whose results are `files`, and of that of --compare, item by item."""
    inputs = SuiteInputs(other.model, options.data, options.seed, True)
    directory = options.out / COMPARED
    make_directory_if_local(directory)
    counted = [suite for suite in chosen if suite.name in files and UNCERTAINTY in files[suite.name]["result"]]
    if not counted:
        raise UserError("--compare: none of the suites that ran counts items: fine-tuning on a regression counts none")
    of_tokens = []
    if other.model.tokenizer.fingerprint != model.tokenizer.fingerprint:
        tests = {suite.name: files[suite.name]["result"][UNCERTAINTY] for suite in counted}
        of_tokens = [(name, test) for name, of in tests.items() for test, one in of.items() if one["same_tokenizer"]]
        counted = [suite for suite in counted if any((suite.name, test) not in of_tokens for test in tests[suite.name])]
        named = ", ".join(f"{test} of {name}" for name, test in of_tokens)
        if not counted:
            raise UserError(f"--compare: the tokenizers differ, and items are tokens, or their candidates, in {named}")
        if of_tokens:
            print(f"note: the tokenizers differ, so tests by tokens are not compared: {named}", file=sys.stderr)
    others, _ = _run_suites(options, counted, inputs, other.digest, directory, f" of {options.compare}")
    rows = []
    for name in others:
        of_model, of_other = (
            result_files.read_items(place / f"{name}.json", of_model[name]["result"])
            for place, of_model in ((options.out, files), (directory, others))
        )
        shared = {test: one for test, one in of_model.items() if (name, test) not in of_tokens}
        rows += comparison.compare(name, shared, of_other)
    if not rows:
        raise UserError("--compare: the models have no test in common: give the same data to both")
    return comparison.adjust(rows)


def _run(options: Any, chosen: list[Suite], models: list[tuple[int | None, StoredPath]]) -> None:
    points, left_out, baselines = [], {}, {}
    other = None if options.compare is None else _read(options.compare)
    for step, source in models:
        model, digest = _read(source)
        if other is not None and digest == other.digest:
            raise UserError(f"--compare {options.compare}: has the weights of {options.model}: give another model")
        directory = _directory(options.out, step)
        inputs = SuiteInputs(model, options.data, options.seed, True, baselines)
        at_step = "" if step is None else f", step {step}"
        files, not_run = _run_suites(options, chosen, inputs, digest, directory, at_step)
        left_out |= not_run
        earlier = _earlier_results(directory, chosen, digest)
        points.append(page.CheckpointResults(step, files | earlier))
    shown = [suite for suite in SUITES if all(suite.name in point.files for point in points)]
    for name, why in left_out.items():
        print(f"{name} was left out: {why}", file=sys.stderr)
    if not shown:
        raise UserError(f"--data {options.data} has no data for any suite: see docs/analysis.md for its folders")
    if len(points) > 1:
        curves = page.flatten_baselines(page.emergence(shown, points))
        _write_with_provenance(options.out / CURVES, {"curves": curves})
    compared = [] if other is None else _compare(options, chosen, model, points[-1].files, other)
    sections = page.sections(f"Analysis of {options.model}", model, shown, points, left_out)
    if compared:
        _write_with_provenance(options.out / COMPARISON, {"tests": compared})
        sections.insert(1, comparison.section(compared, str(options.model), str(options.compare)))
    write_page(options.out / PAGE, "--out", sections)
    for suite in shown:
        for name, scalar in suite.scalars(points[-1].files[suite.name]["result"]).items():
            print(f"{suite.name}: {name}  {scalar_text(scalar)}")
    for line in comparison.lines(compared):
        print(line)
    print(f"wrote {options.out / PAGE}")


def _write_with_provenance(path: StoredPath, values: dict[str, Any]) -> None:
    made = {"provenance": make_provenance(describe_environment())}
    write_atomic(path, json.dumps(values | made, indent=1, allow_nan=False).encode())


def scalar_text(scalar: Scalar) -> str:
    """A number, its interval and what it is compared with."""
    value = f"{scalar.value:.4g}" if math.isfinite(scalar.value) else "undefined"
    spread = {name: f" ± {one:.4g}" for name, one in scalar.deviations.items()}
    beside = [f"{name} {one:.4g}{spread.get(name, '')}" for name, one in scalar.baselines.items()]
    if scalar.interval is not None:
        low, high = scalar.interval
        beside.insert(0, f"95 % of {scalar.over} {low:.4g} to {high:.4g}")
    elif scalar.over == "seeds":
        beside.insert(0, "one seed, no interval")
    return f"{value}  ({', '.join(beside)})" if beside else value
