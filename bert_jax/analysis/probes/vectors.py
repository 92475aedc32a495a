"""Word vectors of every hidden state for sentences of a treebank or of tagged text."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.command.progress import progress_bar
from bert_jax.errors import require
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextRow, batches, encode_words, mean_of_words
from bert_jax.tokenizers.tokenizer import Tokenizer

MIN_SENTENCES = 2


class Sample(NamedTuple):
    """Sentences that were drawn at random, and their rows."""

    sentences: list[Any]
    """Of `treebank.Sentence` or `tagging.TaggedSentence`."""
    rows: list[TextRow]
    skipped: int
    """Sentences that were drawn and left out: too many tokens, or a word that has no token."""
    available: int
    """Sentences of the split."""
    names: tuple[str, ...] = ()
    """Names of the sentences: their split and their number there, from 0."""

    @property
    def lengths(self) -> np.ndarray:
        """Words of each sentence, int64 [n]."""
        return np.array([int(row.word_ids.max()) + 1 for row in self.rows], np.int64)

    @property
    def starts(self) -> np.ndarray:
        """Index of the first word of each sentence among the words of all, int64 [n]."""
        return np.cumsum(self.lengths) - self.lengths

    def first(self, count: int) -> "Sample":
        """The first sentences of the sample, which are themselves drawn at random."""
        return self._replace(sentences=self.sentences[:count], rows=self.rows[:count])


class ProbeVectors(NamedTuple):
    """Vectors of the words of all sentences, one sentence after the other."""

    train: list[jax.Array]
    """Of each hidden state, float32 [words, H]; the mean of a word's token vectors."""
    dev: list[jax.Array]


def draw_sentences(
    sentences: Sequence[Any],
    words_of: Callable[[Any], Sequence[str]],
    tokenizer: Tokenizer,
    max_length: int,
    count: int,
    rng: np.random.Generator,
    where: str,
) -> Sample:
    """At most `count` sentences, drawn without replacement; those that do not fit are skipped.

    Args:
      sentences: of one split.
      words_of: gives the words of a sentence.
      tokenizer: of the model.
      max_length: tokens of a row, special ones included.
      count: number of sentences to draw.
      rng: draws.
      where: of the error, e.g. ``DATA/treebank, train``.

    Raises:
      UserError: fewer than MIN_SENTENCES sentences fit.
    """
    kept: list[Any] = []
    rows: list[TextRow] = []
    names: list[str] = []
    skipped, order = 0, rng.permutation(len(sentences))
    for start in range(0, len(order), count):
        indices = order[start : start + count]
        drawn = [sentences[i] for i in indices]
        encoded = encode_words([words_of(one) for one in drawn], tokenizer, max_length)
        for i, one, row in zip(indices, drawn, encoded, strict=True):
            if len(rows) == count:
                break
            if row is None:
                skipped += 1
                continue
            kept.append(one)
            rows.append(row)
            names.append(f"{where.rpartition(', ')[2]}, sentence {i}")
    require(
        len(rows) >= MIN_SENTENCES,
        f"{where}: {len(rows)} of {len(sentences)} sentences have at most {max_length - 2} tokens and one or more for "
        f"every word: give at least {MIN_SENTENCES}, or raise --probes.max-length",
    )
    return Sample(kept, rows, skipped, len(sentences), tuple(names))


def word_vectors(
    model: LoadedModel, train: Sample, dev: Sample, *, description: str, progress: bool = False
) -> ProbeVectors:
    """Run all sentences once and keep their word vectors, (L + 1) * H * 4 bytes for each word.

    Args:
      model: from `inference.load`.
      train: sentences on which probes are fitted.
      dev: sentences on which they are scored.
      description: of the progress bar.
      progress: show a progress bar on stderr.
    """
    with progress_bar(description, len(train.rows) + len(dev.rows), "sentence", shown=progress) as bar:
        return ProbeVectors(_vectors(model, train, bar.update), _vectors(model, dev, bar.update))


def _vectors(model: LoadedModel, sample: Sample, update: Callable[[int], object]) -> list[jax.Array]:
    starts, lengths = sample.starts, sample.lengths
    shape = (int(lengths.sum()), model.config.hidden_size)
    states = [np.zeros(shape, np.float32) for _ in range(model.config.num_layers + 1)]
    for batch in batches(sample.rows, model.tokenizer.pad_id):
        hidden = capture(model, batch, ["hidden_states"])["hidden_states"]
        for b, index in enumerate(batch.indices):
            if index < 0:
                continue
            of_sentence = mean_of_words(sample.rows[index], hidden[:, b])
            for state, values in zip(states, of_sentence, strict=True):
                state[starts[index] : starts[index] + lengths[index]] = values
        update(int((batch.indices >= 0).sum()))
    # One array after the other, so that no second copy of all exists.
    return [jnp.asarray(states.pop(0)) for _ in range(model.config.num_layers + 1)]


def standardized(train: jax.Array, dev: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both with the mean and the variance of every dimension of the training vectors set to 0 and 1.

    A linear probe can undo this; its optimisation becomes independent of the scale of a layer.
    """
    return _standardized(train, dev)


@jax.jit
def _standardized(train: jax.Array, dev: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean, scale = train.mean(0, keepdims=True), 1 / jnp.maximum(train.std(0, keepdims=True), 1e-6)
    return (train - mean) * scale, (dev - mean) * scale
