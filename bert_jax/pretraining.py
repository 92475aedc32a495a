"""The pretraining job: open corpora, claim a work directory, train; and score what came out."""

import time
from collections.abc import Callable

import jax

from bert_jax.config import Config
from bert_jax.data.batches import Stream
from bert_jax.data.corpus import TOKENIZER, Corpus
from bert_jax.data.gather import Marks
from bert_jax.data.held_out import HeldOut
from bert_jax.data.integrity import check_shards
from bert_jax.data.parts import Part, common_tokenizer, opened, resolve
from bert_jax.directory_lock import DirectoryLock
from bert_jax.errors import UserError
from bert_jax.masking import Vocabulary
from bert_jax.runtime.shared import check_shared
from bert_jax.runtime.together import is_first, meet, refuse_together, tell
from bert_jax.start import read_start
from bert_jax.storage import StoredPath
from bert_jax.tokenizer import Tokenizer
from bert_jax.training import continuation, loop, metrics, workdir
from bert_jax.training.checkpoint import check_place, committed, directory_of
from bert_jax.training.micro_batch import Asked
from bert_jax.training.pretraining_task import Pretraining


def open_task(config: Config, parts: list[Part]) -> Pretraining:
    """The task on a mixture of prepared corpora, both splits open.

    Raises:
      UserError: no such corpus, one twice, one with more token ids than the model has embeddings, tokenizers that
        differ from corpus to corpus or from what a corpus was built with, splits too small for the format.
    """
    parts, corpora = opened(parts)
    tokenizer = common_tokenizer(corpora, config.model.vocab_size)
    place = jax.process_index(), jax.process_count()
    marks = Marks(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
    vocabulary = Vocabulary(
        tokenizer.vocab_size, tokenizer.mask_id, tokenizer.special_ids, tokenizer.continues_word.tobytes()
    )
    shares = resolve(parts, [corpus.num_tokens for corpus in corpora], config.data.mixture_exponent)
    train = Stream(corpora, shares, config, marks, *place)
    held_out = HeldOut([Corpus.open(part.directory, "validation") for part in parts], config.data, marks, *place)
    # A split that cannot be read is refused now, not when its turn comes after hours.
    for rows in train.corpora:
        for phase in config.phases:
            rows.plan(phase.seq_len)
    for rows in held_out.corpora:
        rows.plan(config.phases[-1].seq_len)
    return Pretraining(config, vocabulary, train, held_out)


def pretrain(
    config: Config,
    parts: list[Part],
    directory: StoredPath,
    *,
    profile: tuple[int, int] | None = None,
    micro_batch: Asked = None,
    announce: Callable[[], None] = lambda: None,
) -> loop.Place:
    """Train in a work directory, or continue the run that it holds.

    Args:
      config, parts: of the run.
      directory: of the run.
      profile: see `loop.train`.
      micro_batch: rows at a time on each device, "auto", or None for what the config and the memory make of it.
      announce: called in the first process when all is checked, before anything is compiled.

    Raises:
      UserError: see `open_task`, `check_shards`, `read_start`, `workdir.claim`, `continuation.check`, `check_shared`
        and `loop.train`; another run is at work in the directory. Nothing is written before all is checked, but whether
        the directory is shared.
    """
    begun = time.time()
    check_place(directory)
    task = open_task(config, parts)
    assert task.train is not None
    loop.checked_mesh(task, micro_batch)
    metrics.check(config.log.wandb)
    corpora = [rows.corpus for rows in task.train.corpora]
    refuse_together(lambda: check_shards(corpora, config.data.verify, *task.train.place))
    tokenizer_text = (corpora[0].directory / TOKENIZER).read_text(encoding="utf-8")
    mixture = {corpus.identity: share for corpus, share in zip(corpora, task.train.shares, strict=True)}
    start = None
    begun_before = tell("a first checkpoint", lambda: any(committed(directory_of(directory))))
    if config.start.source is not None and not begun_before:
        start = read_start(config, Tokenizer.load(corpora[0].directory))
    paths = [str(part.directory) for part in parts]

    with DirectoryLock(directory) as lock:

        def claim() -> None:
            before = workdir.held_config(directory, config, mixture, paths)
            lock.acquire()
            if before is not None:
                continuation.check(directory, before, config)
            workdir.claim(directory, config, mixture, paths, tokenizer_text)

        tell("the work directory", claim)
        if jax.process_count() > 1:
            check_shared(directory)
        if is_first():
            announce()
        about = {"tokenizer_fingerprint": corpora[0].tokenizer_fingerprint}
        place = loop.train(
            task, directory, about, start=start, profile=profile, micro_batch=micro_batch, begun=begun, check=lock.check
        )
        meet("the end")  # whoever has nothing to write waits for what the first process writes
    return place


def evaluate(directory: StoredPath, parts: list[Part]) -> dict[str, float]:
    """Held-out metrics of a run's newest intact checkpoint on the validation splits of corpora.

    Raises:
      UserError: no run, no checkpoint, no corpus, or a corpus made with another tokenizer.
    """
    config = workdir.read_config(directory)
    tokenizer = Tokenizer.load(directory / workdir.TOKENIZER)
    task = open_task(config, parts)
    assert task.train is not None
    if task.train.corpora[0].corpus.tokenizer_fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"corpus {parts[0].directory} was built with another tokenizer than the run in {directory}: "
            f"build it again with --tokenizer {directory / workdir.TOKENIZER}"
        )
    return loop.evaluate_newest(task, directory)
