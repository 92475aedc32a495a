"""The lens over a model: readings at masked tokens of text, beside random weights and token frequencies."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.bootstrap import bootstrap_mean
from bert_jax.analysis.item_scores import MODEL, ItemScores, mean_of_seeds, tests_over_seeds
from bert_jax.analysis.lens.readings import (
    Readings,
    leads_since,
    median_ranks,
    read_logits,
    sums_of_texts,
    unigram_readings,
)
from bert_jax.analysis.lens.section import blocks, scalars
from bert_jax.analysis.suite import ITEMS, Suite, SuiteInputs, SuiteResult
from bert_jax.array_types import Float
from bert_jax.command.progress import progress_bar
from bert_jax.errors import require
from bert_jax.field_validation import Count, Rate, check
from bert_jax.inference.embedding import row_length
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import (
    TOKENS_PER_BATCH,
    TextRow,
    batches,
    choose_masked,
    masked_positions,
    sample_texts,
)
from bert_jax.tokenizers.tokenizer import Tokenizer

LOGITS_IN_MEMORY = 2**26
"""Logits of all hidden states that a batch computes at once: 256 MiB in float32."""
STATES = "layers.*.mlm_logits"


@dataclass(frozen=True)
class LensSettings:
    """What the lens reads."""

    texts: Count = 400
    """Lines of text/, drawn at random."""
    max_length: Count = 128
    """Tokens of a text, special ones included, at most the model's positions; longer lines are skipped."""
    mask_share: Rate = 0.15
    """Share of a text's tokens that are masked, all by the mask token; at least one token is."""
    examples: Count = 4
    """Masked tokens whose predictions are listed."""
    example_length: Count = 24
    """Largest number of tokens of the texts of these, if there are such texts."""
    random_seeds: Count = 1
    """Seeds of random weights, from --seed on, each as costly as the first; their numbers are means over them."""

    def __post_init__(self) -> None:
        check(self, "lens.")
        require(self.mask_share > 0, "lens.mask_share is 0: it must be above 0")


def read_masked(
    model: LoadedModel, rows: list[TextRow], masked: list[np.ndarray], *, progress: bool = False
) -> tuple[Readings, np.ndarray, np.ndarray]:
    """Replace tokens by the mask token, and read every hidden state through the MLM head there.

    Only the tokenizer's tokens are candidates: rows of the vocabulary after its last one are left out.

    Args:
      model: with an MLM head.
      rows: of texts.
      masked: positions in each row.
      progress: show a progress bar on stderr.

    Returns:
      the readings of all masked tokens,
      the tokens, int64 [n], and
      for each the index of its row, int64 [n], rows ascending.
    """
    config, tokenizer = model.config, model.tokenizer
    most: dict[int, int] = {}
    for row, positions in zip(rows, masked, strict=True):
        length = row_length(len(row.input_ids))
        most[length] = max(most.get(length, 0), len(positions))
    share = max(count / length for length, count in most.items())
    tokens_per_batch = int(LOGITS_IN_MEMORY / ((config.num_layers + 1) * config.vocab_size * share))
    found: list[tuple[np.ndarray, ...]] = []
    with progress_bar("lens", len(rows), "text", shown=progress) as bar:
        for batch in batches(rows, tokenizer.pad_id, min(tokens_per_batch, TOKENS_PER_BATCH)):
            positions, valid = masked_positions(batch, masked, most[batch.input_ids.shape[1]])
            hidden = batch.input_ids.copy()
            np.put_along_axis(hidden, positions, tokenizer.mask_id, axis=1)
            logits = capture(model, batch._replace(input_ids=hidden), [STATES], positions=positions)[STATES]
            tokens = np.take_along_axis(batch.input_ids, positions, axis=1)[valid].astype(np.int64)
            readings = read_logits(logits[:, valid, : tokenizer.vocab_size], tokens)
            found.append((*readings, tokens, np.repeat(batch.indices, valid.sum(1))))
            bar.update(int((batch.indices >= 0).sum()))
    *readings, tokens, indices = (np.concatenate(values, axis=-1) for values in zip(*found, strict=True))
    order = np.argsort(indices, kind="stable")
    return Readings(*(values[:, order] for values in readings)), tokens[order], indices[order]


class TextSums(NamedTuple):
    """Sums over the masked tokens of each text, of the last state: what an item of a test is."""

    correct: Float[np.ndarray, " t"]
    loss_nats: Float[np.ndarray, " t"]


class Summary(NamedTuple):
    """Readings of a model at all masked tokens."""

    sums: TextSums
    values: dict[str, Any]
    """Means over masked tokens by hidden state, with intervals over texts, as plain values."""


def summarize(readings: Readings, tokens: np.ndarray, texts: np.ndarray) -> Summary:
    """Means over masked tokens by hidden state, and how many of them lead since which state.

    Args:
      readings: of `read_masked`.
      tokens: the masked ones, int64 [n].
      texts: index of the row of each, int64 [n], ascending.
    """
    states = len(readings.top)
    counts = sums_of_texts(np.ones(len(tokens)), texts)
    known, settled = leads_since(readings.top, tokens), leads_since(readings.top, readings.top[-1])
    is_known = known < states

    def mean(values: np.ndarray) -> dict[str, Any]:
        return bootstrap_mean(sums_of_texts(values, texts), None, counts)._asdict()

    by_state = np.arange(states)[:, None]
    correct, losses = readings.ranks == 1, -readings.log_likelihoods
    of_known = bootstrap_mean(sums_of_texts(np.where(is_known, known, 0), texts), None, sums_of_texts(is_known, texts))
    return Summary(
        TextSums(sums_of_texts(correct[-1], texts), sums_of_texts(losses[-1], texts)),
        {
            "accuracy": mean(correct),
            "loss_nats": mean(losses),
            "median_rank": median_ranks(readings.ranks, texts)._asdict(),
            "divergence_from_last_nats": mean(readings.divergences),
            "known": int(is_known.sum()),
            "known_since": np.bincount(known[is_known], minlength=states).tolist(),
            "known_share": mean(known <= by_state),
            "mean_known_since": of_known._asdict(),
            "settled_since": np.bincount(settled, minlength=states).tolist(),
            "settled_share": mean(settled <= by_state),
            "mean_settled_since": mean(settled),
            "masked": len(tokens),
        },
    )


PREDICTED, LOSS = "masked tokens predicted by the last state", "loss at masked tokens, last state"


def run(inputs: SuiteInputs, settings: LensSettings) -> SuiteResult:
    """The readings of the model and of random weights at the same masked tokens, and the unigram baseline.

    Raises:
      UserError: no MLM head, a causal model, no text/, or no line of it fits.
    """
    model, tokenizer = inputs.model, inputs.model.tokenizer
    require(model.heads.mlm, "lens: the model has no MLM head: give one that was pretrained with one")
    require(model.config.direction == "bidirectional", "lens: a causal model does not predict masked tokens")
    length = min(settings.max_length, model.config.max_positions)
    sample = sample_texts(inputs.files("text", ".txt"), tokenizer, length, settings.texts, inputs.seed)
    masked = choose_masked(sample.rows, tokenizer.special_ids, settings.mask_share, inputs.seed)
    kept = [i for i, positions in enumerate(masked) if len(positions)]
    require(bool(kept), "lens: no line of text/ has a token that the vocabulary knows: give other texts")
    rows, masked = [sample.rows[i] for i in kept], [masked[i] for i in kept]
    readings, tokens, row_of_token = read_masked(model, rows, masked, progress=inputs.progress)

    def summary_of(model: LoadedModel) -> Summary:
        return summarize(read_masked(model, rows, masked, progress=inputs.progress)[0], tokens, row_of_token)

    unigram = unigram_readings(tokens, _counts_of_unmasked(rows, masked, tokenizer))
    of_model = summarize(readings, tokens, row_of_token)
    randoms = inputs.of_random_weights("lens", summary_of, settings.random_seeds)
    of_unigram = [sums_of_texts(values, row_of_token) for values in (unigram.correct, unigram.loss_nats)]
    names = tuple(f"text {sample.numbers[i]}" for i in kept)

    def tests_of(random: Summary) -> dict[str, ItemScores]:
        sums = {MODEL: of_model.sums, "random_weights": random.sums, "token_frequency": of_unigram}
        weights = dict.fromkeys(sums, sums_of_texts(np.ones(len(tokens)), row_of_token))
        return {
            title: ItemScores(names, None, {row: of[i] for row, of in sums.items()}, weights, unit, same_tokenizer=True)
            for i, (title, unit) in enumerate(((PREDICTED, "%"), (LOSS, "nats")))
        }

    return {
        "layers": model.config.num_layers,
        "seed": inputs.seed,
        "texts": len(rows),
        "lines": sample.lines,
        "skipped_lines": sample.skipped,
        "texts_without_known_token": len(sample.rows) - len(rows),
        "masked_tokens": len(tokens),
        "mask_share": settings.mask_share,
        "random_seeds": settings.random_seeds,
        "model": of_model.values,
        "random_weights": mean_of_seeds(randoms).values,
        "unigram": unigram.means,
        "examples": _examples(rows, masked, readings, row_of_token, tokenizer, settings),
        ITEMS: tests_over_seeds(tests_of, randoms),
    }


def _counts_of_unmasked(rows: list[TextRow], masked: list[np.ndarray], tokenizer: Tokenizer) -> np.ndarray:
    kept = [np.delete(row.input_ids, positions) for row, positions in zip(rows, masked, strict=True)]
    counts = np.bincount(np.concatenate(kept), minlength=tokenizer.vocab_size)
    counts[list(tokenizer.special_ids)] = 0
    return counts


def _examples(
    rows: list[TextRow],
    masked: list[np.ndarray],
    readings: Readings,
    row_of_token: np.ndarray,
    tokenizer: Tokenizer,
    settings: LensSettings,
) -> list[dict[str, Any]]:
    """The first masked token of the first texts that are short."""
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids) > settings.example_length)
    examples = []
    for i in by_length[: settings.examples]:
        first = int(np.searchsorted(row_of_token, i))
        ids, position = rows[i].input_ids.copy(), int(masked[i][0])
        gold = tokenizer.id_to_token(int(ids[position]))
        ids[masked[i]] = tokenizer.mask_id
        examples.append(
            {
                "text": tokenizer.decode(ids[1:-1]),
                "position": position,
                "masked": gold,
                "top_by_state": [tokenizer.id_to_token(int(token)) for token in readings.top[:, first]],
                "rank_by_state": readings.ranks[:, first].tolist(),
            }
        )
    return examples


SUITE = Suite("lens", LensSettings, ("text",), run, blocks, scalars, needs_mlm_head=True)
