"""The pretraining job: open corpora, acquire a work directory, train; and evaluate a trained run."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from bert_jax.config import Config, MeshConfig
from bert_jax.config.sections import FUSED_ATTENTION, PAIR_FORMATS
from bert_jax.config.training import MIN_SEQ_LEN
from bert_jax.data.batch import SpecialIds
from bert_jax.data.batches import HeldOutRows, TrainingStream
from bert_jax.data.corpus import Corpus
from bert_jax.data.integrity import check_corpus_files
from bert_jax.data.manifest import TOKENIZER
from bert_jax.data.mixture import CorpusWeight, common_tokenizer, open_corpora, resolve_shares
from bert_jax.distributed.agreement import raise_on_all
from bert_jax.distributed.device_errors import describing_device_errors
from bert_jax.errors import UserError
from bert_jax.objectives import masked_lm
from bert_jax.objectives.masking import Vocabulary
from bert_jax.storage.cache import LocalCache
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training import loop
from bert_jax.training.fork import open_fork
from bert_jax.training.implementation import choose_implementation
from bert_jax.training.job import (
    RunData,
    has_checkpoint,
    intact_checkpoint,
    params_and_phase,
    run_directory_of,
    run_job,
)
from bert_jax.training.micro_batch import MicroBatchRequest, choose_accumulations
from bert_jax.training.monitoring.event_hook import OnEvent, ignore_event
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs
from bert_jax.training.run_directory import metrics, workdir
from bert_jax.training.run_directory.checkpoint import check_checkpoint_storage
from bert_jax.training.run_directory.run_tokenizer import load_tokenizer
from bert_jax.training.save_schedule import check_keep_best
from bert_jax.training.sharding import check_processes, device_kind, make_mesh
from bert_jax.training.state import Fork, InitialParams
from bert_jax.training.task import Params, Task


def open_task(config: Config, parts: list[CorpusWeight]) -> Pretraining:
    """The task on a mixture of prepared corpora, with both splits open.

    Raises:
      UserError: a corpus does not exist, is given twice, or has more token ids than the model has embeddings;
        tokenizers differ between corpora or from the one that a corpus was built with; a split is too small for the
        format.
    """
    cache = LocalCache(config.data.cache_dir, config.data.cache_limit_gb)
    parts, corpora = open_corpora(parts, cache=cache)
    tokenizer = common_tokenizer(corpora, config.model.vocab_size)
    process = jax.process_index(), jax.process_count()
    marks = SpecialIds(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
    vocabulary = Vocabulary(
        tokenizer.vocab_size, tokenizer.mask_id, tokenizer.special_ids, tokenizer.continues_word.tobytes()
    )
    shares = resolve_shares(parts, [corpus.num_tokens for corpus in corpora], config.data.mixture_exponent)
    train = TrainingStream(corpora, shares, config, marks, *process)
    splits = [Corpus.open(part.directory, "validation", cache) for part in parts]
    held_out = HeldOutRows(splits, config.data, marks, *process)
    # Check all splits now: a phase that begins after hours must not fail here.
    for rows in train.corpora:
        for phase in config.phases:
            rows.epoch_planner(phase.seq_len)
    for rows in held_out.corpora:
        rows.epoch_planner(config.phases[-1].seq_len)
    return Pretraining(config, vocabulary, train, held_out)


def check_run(
    config: Config,
    parts: list[CorpusWeight],
    directory: StoredPath,
    check_source: Callable[[Config, Tokenizer], None] | None = None,
) -> None:
    """Check, without writing, that the corpora and the work directory fit a run; `pretrain` checks it again.

    Args:
      config, parts, directory: as of `pretrain`.
      check_source: checks `start.source` (`convert.init_from.check_source`) of a run without a checkpoint; None: forks
        and other sources are not checked.

    Raises:
      UserError: see `open_task` and `workdir.matching_config`; and those of `open_fork` and `check_source`.
    """
    config = choose_implementation(config, device_kind(make_mesh(config.mesh)))
    task = open_task(config, parts)
    assert task.train is not None
    workdir.matching_config(directory, config, _shares(task), [str(part.directory) for part in parts])
    if check_source is not None:
        _initial_params(config, directory, [rows.corpus for rows in task.train.corpora], check_source)


def _shares(task: Pretraining) -> dict[str, float]:
    """The share of each corpus in the stream, by identity."""
    assert task.train is not None
    return {rows.corpus.identity: share for rows, share in zip(task.train.corpora, task.train.shares, strict=True)}


def pretrain(
    config: Config,
    parts: list[CorpusWeight],
    directory: StoredPath,
    *,
    profile: tuple[int, int] | None = None,
    micro_batch: MicroBatchRequest = None,
    announce: Callable[[], None] = lambda: None,
    load_initial_params: Callable[[Config, Tokenizer], InitialParams] | None = None,
    make_programs: Callable[[Task, Mesh], Programs] = Programs,
    restart: bool = False,
    on_event: OnEvent = ignore_event,
) -> loop.Progress:
    """Train in a work directory, or continue its run.

    Args:
      config: of the run.
      parts: corpora and their weights.
      directory: work directory of the run.
      profile, micro_batch: see `loop.train` and `micro_batch.choose_accumulations`.
      announce: called in the first process after all checks, before compilation.
      load_initial_params: reads `start.source` (`convert.init_from.load_initial_params`); called with the corpora's
        tokenizer if the work directory has no checkpoint yet.
      make_programs: the programs of the run; with others than `Programs`, several runs can share compiled steps.
      restart, on_event: see `job.run_job`.

    Raises:
      ValueError: a config with `start.source` without `load_initial_params`.
      UserError: the config, the corpora or the work directory cannot be used, or another process trains in it. Nothing
        is written before all checks but `check_shared_directory` have passed.
    """
    start = time.perf_counter()
    check_checkpoint_storage(directory, jax.process_count())
    mesh = make_mesh(config.mesh)
    config = choose_implementation(config, device_kind(mesh))
    task = open_task(config, parts)
    assert task.train is not None
    programs = make_programs(task, mesh)
    check_keep_best(programs)
    accumulations = choose_accumulations(programs, jax.process_count(), micro_batch)
    metrics.check_wandb(config.log.wandb)
    corpora = [rows.corpus for rows in task.train.corpora]
    process = jax.process_index(), jax.process_count()
    keep_open = not config.data.reader_processes
    raise_on_all(lambda: check_corpus_files(corpora, config.data.verify, *process, keep_open=keep_open))
    tokenizer_text = (corpora[0].directory / TOKENIZER).read_text(encoding="utf-8")
    paths = [str(part.directory) for part in parts]
    return run_job(
        programs,
        accumulations,
        directory,
        RunData(_shares(task), paths, tokenizer_text, corpora[0].tokenizer_fingerprint),
        initial=_initial_params(config, directory, corpora, load_initial_params),
        announce=announce,
        profile=profile,
        start=start,
        restart=restart,
        on_event=on_event,
    )


def _initial_params(
    config: Config,
    directory: StoredPath,
    corpora: list[Corpus],
    load_initial_params: Callable[[Config, Tokenizer], InitialParams | None] | None,
) -> InitialParams | Fork | None:
    """What a config with `start.source` begins with, unless the run has a checkpoint."""
    if config.start.source is None or has_checkpoint(directory):
        return None
    if (fork := open_fork(config, corpora)) is not None:
        return fork
    if load_initial_params is None:
        raise ValueError("a config with start.source needs load_initial_params")
    return load_initial_params(config, Tokenizer.load(corpora[0].directory))


class EvaluationResult(NamedTuple):
    """Held-out metrics, and the rows that they were computed on."""

    format: str
    example_end: str
    seq_len: int
    """Tokens per row."""
    rows: int
    """Largest number of rows of each validation split."""
    metrics: dict[str, float]


def evaluate(source: StoredPath, parts: list[CorpusWeight], **options: Any) -> EvaluationResult:
    """Held-out metrics of a run's newest intact checkpoint, or of the checkpoint ``RUN/checkpoints/STEP``.

    Args:
      source: the work directory of the run, or a checkpoint in it.
      parts, options: as of `evaluate_model`, and so are its errors.

    Raises:
      UserError: also if there is no run or no intact checkpoint.
    """
    directory = run_directory_of(source)
    config, checkpoint = workdir.read_config(directory), intact_checkpoint(source)
    tokenizer = load_tokenizer(directory, checkpoint)

    def load(programs: Programs) -> tuple[Params, int]:
        return params_and_phase(programs, checkpoint)

    return evaluate_model(config, tokenizer, load, directory, parts, **options)


def evaluate_model(
    config: Config,
    tokenizer: Tokenizer,
    load_params: Callable[[Programs], tuple[Params, int]],
    name: StoredPath,
    parts: list[CorpusWeight],
    *,
    form: str | None = None,
    seq_len: int | None = None,
    rows: int | None = None,
    make_programs: Callable[[Task, Mesh], Programs] = Programs,
) -> EvaluationResult:
    """Held-out metrics of a model on the validation splits of corpora.

    The rows are split over the devices of all processes, whatever the mesh of the run was. All processes call this.

    Args:
      config: of the model's run, or one with its architecture and the wanted rows.
      tokenizer: of the model.
      load_params: returns its parameters on the mesh, and the phase whose depth they have.
      name: its directory, for messages.
      parts: corpora with the validation splits to evaluate.
      form: format of the rows, with examples that end at a sentence; None: format and example_end of the config. Pair
        metrics need a format with the labels that the model was trained on.
      seq_len: tokens per row; None: as in the config's last phase.
      rows: of each validation split; None: the config's evaluation.rows.
      make_programs: as in `pretrain`.

    Raises:
      UserError: no corpus, a corpus built with another tokenizer, or rows that the model does not support.
    """
    config = _evaluation_config(config, form, seq_len, rows)
    task = open_task(config, parts)
    assert task.train is not None
    if task.train.corpora[0].corpus.tokenizer_fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"corpus {parts[0].directory} was built with another tokenizer than the model in {name}: "
            f"build it again with --tokenizer {name / workdir.TOKENIZER}"
        )
    data, max_rows = config.data, config.evaluation.rows
    mesh = make_mesh(config.mesh)
    check_processes(mesh, jax.process_count())  # training batches need not divide over this mesh
    programs = make_programs(task, mesh)
    with describing_device_errors("use more devices"):
        metrics = programs.evaluate(*load_params(programs))
    return EvaluationResult(data.format, data.example_end, config.phases[-1].seq_len, max_rows, metrics)


def _evaluation_config(config: Config, form: str | None, seq_len: int | None, rows: int | None) -> Config:
    """A run's config with other held-out rows, for the devices that are here."""
    model, data, evaluation, last = config.model, config.data, config.evaluation, config.phases[-1]
    if form is not None:
        data = dataclasses.replace(data, format=form, example_end="sentence")
    if data.cache_dir is not None and not Path(data.cache_dir).is_dir():  # of another host
        data = dataclasses.replace(data, cache_dir=None)
    if data.paired and model.type_vocab_size < 2:
        raise UserError(
            f"--format {form} marks its second segment with token type 1, and the model has {model.type_vocab_size} "
            "token type(s): use full_sentences or doc_sentences"
        )
    if seq_len is not None:
        if not MIN_SEQ_LEN <= seq_len <= model.max_positions:
            raise UserError(f"--seq-len is {seq_len}: it must be from {MIN_SEQ_LEN} to {model.max_positions}")
        last = dataclasses.replace(last, seq_len=seq_len)
    if rows is not None:
        if rows < 1:
            raise UserError(f"--rows is {rows}: it must be at least 1")
        evaluation = dataclasses.replace(evaluation, rows=rows)
    if model.attention in FUSED_ATTENTION:
        model = dataclasses.replace(model, attention="xla", attention_dropout=0.0)
    # Nothing is trained, and what only a training task has, such as a teacher, is not there.
    without = {"frozen": (), "mask_rate": None, "end_mask_rate": None, "corpus_weights": ()}
    data = dataclasses.replace(data, language_exponent=1.0, language_weights=(), source_weights=(), score_weights=())
    phases = [dataclasses.replace(phase, **without) for phase in (*config.phases[:-1], last)]
    pair = config.objective.pair if data.format in PAIR_FORMATS.get(config.objective.pair, ()) else "none"
    return dataclasses.replace(
        config,
        model=model,
        data=data,
        evaluation=evaluation,
        objective=dataclasses.replace(config.objective, pair=pair, mask_rate=masked_lm.EVALUATION_MASKS.mask_rate),
        phases=tuple(phases),
        mesh=MeshConfig(),
    )
