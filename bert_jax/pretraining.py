"""The pretraining job: open a corpus, claim a work directory, train; and score what came out."""

import dataclasses
import hashlib
from pathlib import Path

import jax

from bert_jax.config import Config, DataConfig
from bert_jax.data.batches import Stream
from bert_jax.data.corpus import MANIFEST, TOKENIZER, Corpus
from bert_jax.errors import UserError
from bert_jax.objectives import Vocabulary
from bert_jax.tokenizer import Tokenizer
from bert_jax.training import loop, workdir
from bert_jax.training.masked_lm import Pretraining


def open_task(config: Config, corpus: Path) -> Pretraining:
    """The task on a prepared corpus, both splits open.

    Raises:
      UserError: no such corpus, or one with more token ids than the model has embeddings.
    """
    splits = [Corpus.open(corpus, split) for split in ("train", "validation")]
    if splits[0].vocab_size > config.model.vocab_size:
        raise UserError(
            f"corpus {corpus} has token ids up to {splits[0].vocab_size - 1}, but model.vocab_size is "
            f"{config.model.vocab_size}: set --model.vocab-size {splits[0].vocab_size}"
        )
    tokenizer = Tokenizer.load(corpus / TOKENIZER)
    place = jax.process_index(), jax.process_count()
    vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.mask_id, tokenizer.special_ids)
    train = Stream(splits[0], config, tokenizer, *place)
    # The same held-out rows for every seed and every choice of data.*, so that runs can be compared.
    held_out = dataclasses.replace(config, seed=0, data=DataConfig())
    return Pretraining(config, vocabulary, train, Stream(splits[1], held_out, tokenizer, *place))


def pretrain(config: Config, corpus: Path, directory: Path, profile: tuple[int, int] | None = None) -> loop.Place:
    """Train in a work directory, or continue the run that it holds.

    Raises:
      UserError: see `open_task`, `workdir.claim` and `loop.train`; nothing is written before all is checked.
    """
    task = open_task(config, corpus)
    assert task.train is not None and task.validation is not None
    loop.checked_mesh(task)
    # A split that cannot be read is refused now, not when its turn comes after hours.
    task.train.plan(config.phases[0].seq_len, 0)
    task.validation.plan(config.phases[-1].seq_len, 0)
    manifest = hashlib.sha256((corpus / MANIFEST).read_bytes()).hexdigest()
    tokenizer_text = (corpus / TOKENIZER).read_text(encoding="utf-8")
    workdir.claim(directory, config, {str(corpus.resolve()): manifest}, tokenizer_text)
    about = {"tokenizer_fingerprint": task.train.tokenizer.fingerprint}
    return loop.train(task, directory, about, profile)


def evaluate(directory: Path, corpus: Path) -> dict[str, float]:
    """Held-out metrics of a run's newest intact checkpoint on the validation split of a corpus.

    Raises:
      UserError: no run, no checkpoint, no corpus, or a corpus made with another tokenizer.
    """
    config = workdir.read_config(directory)
    tokenizer = Tokenizer.load(directory / workdir.TOKENIZER)
    task = open_task(config, corpus)
    assert task.train is not None
    if task.train.corpus.tokenizer_fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"corpus {corpus} was built with another tokenizer than the run in {directory}: "
            f"build it again with --tokenizer {directory / workdir.TOKENIZER}"
        )
    return loop.evaluate_newest(task, directory)
