"""The pretraining job: open corpora, claim a work directory, train; and score what came out."""

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from bert_jax.config import Config, MeshConfig, ObjectiveConfig
from bert_jax.config.sections import PAIR_FORMATS
from bert_jax.config.training import MIN_SEQ_LEN
from bert_jax.data.batches import TrainingStream
from bert_jax.data.corpus import TOKENIZER, Corpus
from bert_jax.data.held_out import HeldOutRows
from bert_jax.data.integrity import check_corpus_files
from bert_jax.data.mixture_spec import CorpusWeight, common_tokenizer, open_corpora, resolve_shares
from bert_jax.data.row_reader import SpecialIds
from bert_jax.directory_lock import DirectoryLock
from bert_jax.distributed.agreement import is_first, meet, refuse_together, tell
from bert_jax.distributed.shared_filesystem_check import check_shared
from bert_jax.errors import UserError
from bert_jax.objectives.masking import Vocabulary
from bert_jax.storage import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training import continuation, loop
from bert_jax.training.micro_batch import Asked
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.run_directory import metrics, workdir
from bert_jax.training.run_directory.checkpoint import check_place, committed, directory_of
from bert_jax.training.state import Start


def open_task(config: Config, parts: list[CorpusWeight]) -> Pretraining:
    """The task on a mixture of prepared corpora, both splits open.

    Raises:
      UserError: no such corpus, one twice, one with more token ids than the model has embeddings, tokenizers that
        differ from corpus to corpus or from what a corpus was built with, splits too small for the format.
    """
    parts, corpora = open_corpora(parts)
    tokenizer = common_tokenizer(corpora, config.model.vocab_size)
    place = jax.process_index(), jax.process_count()
    marks = SpecialIds(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
    vocabulary = Vocabulary(
        tokenizer.vocab_size, tokenizer.mask_id, tokenizer.special_ids, tokenizer.continues_word.tobytes()
    )
    shares = resolve_shares(parts, [corpus.num_tokens for corpus in corpora], config.data.mixture_exponent)
    train = TrainingStream(corpora, shares, config, marks, *place)
    held_out = HeldOutRows([Corpus.open(part.directory, "validation") for part in parts], config.data, marks, *place)
    # A split that cannot be read is refused now, not when its turn comes after hours.
    for rows in train.corpora:
        for phase in config.phases:
            rows.plan(phase.seq_len)
    for rows in held_out.corpora:
        rows.plan(config.phases[-1].seq_len)
    return Pretraining(config, vocabulary, train, held_out)


def pretrain(
    config: Config,
    parts: list[CorpusWeight],
    directory: StoredPath,
    *,
    profile: tuple[int, int] | None = None,
    micro_batch: Asked = None,
    announce: Callable[[], None] = lambda: None,
    read_start: Callable[[Config, Tokenizer], Start] | None = None,
) -> loop.Place:
    """Train in a work directory, or continue the run that it holds.

    Args:
      config, parts: of the run.
      directory: of the run.
      profile: see `loop.train`.
      micro_batch: rows at a time on each device, "auto", or None for what the config and the memory make of it.
      announce: called in the first process when all is checked, before anything is compiled.
      read_start: reads the parameters to start from, for a config with `start.source` (`convert.init_from.read_start`);
        called when the work directory has no checkpoint yet, with the tokenizer of the corpora.

    Raises:
      ValueError: a config with `start.source`, and no `read_start`.
      UserError: see `open_task`, `check_corpus_files`, `read_start`, `workdir.held_config`, `workdir.claim`,
        `continuation.check`, `check_shared` and `loop.train`; another run is at work in the directory. Nothing is
        written before all is checked, but whether the directory is shared.
    """
    begun = time.time()
    check_place(directory)
    task = open_task(config, parts)
    assert task.train is not None
    loop.checked_mesh(task, micro_batch)
    metrics.check(config.log.wandb)
    corpora = [rows.corpus for rows in task.train.corpora]
    refuse_together(lambda: check_corpus_files(corpora, config.data.verify, jax.process_index(), jax.process_count()))
    tokenizer_text = (corpora[0].directory / TOKENIZER).read_text(encoding="utf-8")
    mixture = {corpus.identity: share for corpus, share in zip(corpora, task.train.shares, strict=True)}
    start = None
    begun_before = tell("a first checkpoint", lambda: any(committed(directory_of(directory))))
    if config.start.source is not None and not begun_before:
        if read_start is None:
            raise ValueError("a config with start.source needs read_start")
        start = read_start(config, Tokenizer.load(corpora[0].directory))
    paths = [str(part.directory) for part in parts]

    with DirectoryLock(directory) as lock:

        def claim() -> None:
            workdir.held_config(directory, config, mixture, paths)  # refuses before anything is written
            lock.acquire()  # a run that has ended meanwhile may have replaced its config
            before = workdir.held_config(directory, config, mixture, paths)
            if before is not None:
                continuation.check(directory, before, config)
            workdir.claim(directory, before, config, mixture, paths, tokenizer_text)

        tell("the work directory", claim)
        if jax.process_count() > 1:
            check_shared(directory)
        if is_first():
            announce()
        about = {"tokenizer_fingerprint": corpora[0].tokenizer_fingerprint}
        place = loop.train(
            task, directory, about, start=start, profile=profile, micro_batch=micro_batch, begun=begun, check=lock.check
        )
        meet("the end")  # the other processes wait for what the first one writes
    return place


class Evaluation(NamedTuple):
    """Held-out metrics, and the rows that they are of."""

    format: str
    example_end: str
    seq_len: int
    """Tokens per row."""
    rows: int
    """Rows of each validation split, at most."""
    metrics: dict[str, float]


def evaluate(
    directory: StoredPath,
    parts: list[CorpusWeight],
    *,
    form: str | None = None,
    seq_len: int | None = None,
    rows: int | None = None,
) -> Evaluation:
    """Held-out metrics of a run's newest intact checkpoint on the validation splits of corpora.

    All devices of this process split the rows, whatever mesh the run was trained on.

    Args:
      directory: of the run.
      parts: corpora whose validation splits are scored.
      form: format of the rows, with examples that end at a sentence; None: format and example_end of the run. Pairs
        are scored only where the format has the labels that the run learned.
      seq_len: tokens per row; None: those of the run's last phase.
      rows: of each validation split; None: the run's evaluation.rows.

    Raises:
      UserError: no run, no checkpoint, no corpus, a corpus made with another tokenizer, or rows that the model cannot
        read.
    """
    config = _scored(workdir.read_config(directory), form, seq_len, rows)
    tokenizer = Tokenizer.load(directory / workdir.TOKENIZER)
    task = open_task(config, parts)
    assert task.train is not None
    if task.train.corpora[0].corpus.tokenizer_fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"corpus {parts[0].directory} was built with another tokenizer than the run in {directory}: "
            f"build it again with --tokenizer {directory / workdir.TOKENIZER}"
        )
    data, scored = config.data, config.evaluation.rows
    metrics = loop.evaluate_newest(task, directory)
    return Evaluation(data.format, data.example_end, config.phases[-1].seq_len, scored, metrics)


def _scored(config: Config, form: str | None, seq_len: int | None, rows: int | None) -> Config:
    """A run's config with other held-out rows, for the devices that are here."""
    model, data, evaluation, last = config.model, config.data, config.evaluation, config.phases[-1]
    if form is not None:
        data = dataclasses.replace(data, format=form, example_end="sentence")
    if data.paired and model.type_vocab_size < 2:
        raise UserError(
            f"--format {form} marks its second segment with token type 1, and the model has {model.type_vocab_size} "
            "token type(s): use full_sentences or doc_sentences"
        )
    if seq_len is not None:
        if not MIN_SEQ_LEN <= seq_len <= model.max_positions:
            raise UserError(f"--seq-len {seq_len}: the model reads {MIN_SEQ_LEN} to {model.max_positions} tokens")
        last = dataclasses.replace(last, seq_len=seq_len)
    if rows is not None:
        if rows < 1:
            raise UserError(f"--rows {rows}: score at least 1 row")
        evaluation = dataclasses.replace(evaluation, rows=rows)
    if model.attention == "cudnn" and jax.default_backend() != "gpu":
        model = dataclasses.replace(model, attention="xla")
    learned = config.objective.pair if data.format in PAIR_FORMATS.get(config.objective.pair, ()) else "none"
    return dataclasses.replace(
        config,
        model=model,
        data=data,
        evaluation=evaluation,
        objective=ObjectiveConfig(pair=learned),
        phases=(*config.phases[:-1], last),
        mesh=MeshConfig(),
    )
