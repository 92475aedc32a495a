"""Examples in one row are independent: gradients across examples are exactly zero, losses equal those alone."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import ModelConfig, ObjectiveConfig
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads, gather_positions, score_labels
from bert_jax.objectives.causal_lm import add_next_token_targets
from bert_jax.objectives.objectives import active_objectives, pretraining_sums
from tests.model.toy import BERT, parameters

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTHS, SEQ_LEN, SLOTS = (7, 5, 6), 20, 4
WHERE = list(itertools.pairwise(itertools.accumulate(LENGTHS, initial=0)))
"""Start and stop of each example in the packed row; two positions of padding follow."""
LOCAL = dataclasses.replace(BERT, positions="rotary", norm_placement="pre", attention_window=2, global_every=2)
CONFIGS = [
    dataclasses.replace(base, direction=direction, attention=attention)
    for base in (BERT, LOCAL)
    for direction in ("bidirectional", "causal")
    for attention in ("reference", "xla")
]


def name(config: ModelConfig) -> str:
    return f"{config.direction}-{config.attention}-{config.positions}"


def make_rows(direction: str) -> dict[str, jax.Array]:
    """Row 0 holds three examples, rows 1 to 3 hold each of them alone; with targets."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(5, BERT.vocab_size, length) for length in LENGTHS]
    names = ("input_ids", "token_type_ids", "segment_ids", "position_ids")
    batch = {key: np.zeros((4, SEQ_LEN), np.int32) for key in names}
    batch |= {key: np.full((4, SLOTS), -1, np.int32) for key in ("example_id", "pair_labels")}
    batch["cls_positions"] = np.zeros((4, SLOTS), np.int32)
    targets = {key: np.zeros((4, 6), np.int32) for key in ("target_positions", "target_labels", "target_weights")}
    for example, text in enumerate(texts):
        for row, slot, start in ((0, example, WHERE[example][0]), (1 + example, 0, 0)):
            tokens = slice(start, start + len(text))
            batch["input_ids"][row, tokens], batch["position_ids"][row, tokens] = text, np.arange(len(text))
            batch["token_type_ids"][row, start + 3 : tokens.stop] = 1
            batch["segment_ids"][row, tokens] = slot + 1
            batch["cls_positions"][row, slot], batch["example_id"][row, slot] = start, example
            batch["pair_labels"][row, slot] = example % 2
            chosen = slice(2 * slot, 2 * slot + 2)
            targets["target_positions"][row, chosen] = start + 1, start + 3
            targets["target_labels"][row, chosen] = text[[1, 3]]
            targets["target_weights"][row, chosen] = 1
    targets["target_weights"] = targets["target_weights"].astype(np.float32)
    rows = {key: jnp.asarray(array) for key, array in batch.items()}
    if direction == "causal":
        return add_next_token_targets(rows)
    return rows | {key: jnp.asarray(array) for key, array in targets.items()}


def losses(config: ModelConfig, embeddings: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Negative log likelihood of each target [B, M] and, with the weight of each, of each pair label [B, K]."""
    model = bert.merge_params(config, Heads(pair=True), parameters(config))
    inputs = EncoderInputs(*(batch[field] for field in EncoderInputs._fields))
    output = model.encoder(inputs, inputs_embeds=embeddings)
    hidden = gather_positions(output.hidden, batch["target_positions"])
    tokens, _ = score_labels(model.mlm(hidden, model.encoder.embeddings.attend), batch["target_labels"])
    pairs, _ = score_labels(model.pair(output.pooled), jnp.maximum(batch["pair_labels"], 0))
    return -tokens * batch["target_weights"], -pairs * (batch["pair_labels"] >= 0)


def look_up(config: ModelConfig, batch: dict[str, jax.Array]) -> jax.Array:
    return parameters(config)["encoder"]["embeddings"]["word"][batch["input_ids"]]


@functools.cache
def compiled(config: ModelConfig):
    """(embeddings, batch, owners [B, M]) -> losses [B, K] of the examples, and gradients [K, B, S, H] of row 0's."""

    def of_examples(embeddings, batch, owners):
        tokens, pairs = losses(config, embeddings, batch)
        own = (owners[:, :, None] == jnp.arange(SLOTS)[None, None]).astype(jnp.float32)
        return jnp.einsum("bm,bmk->bk", tokens, own) + pairs

    def both(embeddings, batch, owners):
        return (
            of_examples(embeddings, batch, owners),
            jax.jacrev(lambda e: of_examples(e, batch, owners)[0])(embeddings),
        )

    return jax.jit(both)


def measure(config: ModelConfig, *, apart: bool) -> tuple[np.ndarray, np.ndarray]:
    """Losses [B, K] and, for each of the three examples, the largest gradient at each position [3, S] of row 0."""
    batch = make_rows(config.direction)
    owners = jnp.take_along_axis(batch["segment_ids"], batch["target_positions"], axis=1) - 1
    if not apart:
        batch |= {"segment_ids": jnp.minimum(batch["segment_ids"], 1)}
    example_losses, gradients = compiled(config)(look_up(config, batch), batch, owners)
    return np.asarray(example_losses), np.abs(np.asarray(gradients)).max(-1)[:3, 0]


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_gradients_across_examples_are_zero(config):
    _, gradients = measure(config, apart=True)
    _, mixed = measure(config, apart=False)
    for example, (start, stop) in enumerate(WHERE):
        own = (np.arange(SEQ_LEN) >= start) & (np.arange(SEQ_LEN) < stop)
        assert (gradients[example, ~own] == 0.0).all()
        # Only the last token of an example of a causal model has no influence.
        assert (gradients[example, start : stop - 1] > 1e-4).all()
        # With one segment for all examples, gradients across examples are not zero: the mask causes the zeros above.
        before, after = mixed[example, :start], mixed[example, stop : WHERE[-1][1]]
        assert (before > 1e-5).all()
        assert (after == 0.0).all() if config.direction == "causal" else (after > 1e-5).all()


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_losses_are_those_of_the_examples_alone(config):
    packed, _ = measure(config, apart=True)
    np.testing.assert_allclose(packed[0, :3], packed[1:, 0], rtol=1e-5)
    mixed, _ = measure(config, apart=False)
    assert (np.abs(mixed[0, 1:3] / packed[0, 1:3] - 1) > 1e-3).all()
    # The losses above equal the training losses.
    batch = make_rows(config.direction)
    model, objectives = (
        bert.merge_params(config, Heads(pair=True), parameters(config)),
        active_objectives(config, ObjectiveConfig()),
    )
    sums = pretraining_sums(objectives, model, batch, None)
    total = sum(sums[f"{name}_loss"].sum for name in objectives)
    np.testing.assert_allclose(packed.sum(), total, rtol=1e-5)


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.attention == "xla"], ids=name)
def test_a_causal_loss_depends_on_earlier_tokens_only(config):
    """The gradient of each target in a causal model is zero after its position, and nowhere zero before."""
    batch = {key: array[:1] for key, array in make_rows("causal").items()}
    gradient = jax.jit(jax.jacrev(lambda e: losses(config, e, batch)[0][0]))(look_up(config, batch))
    reached = np.abs(np.asarray(gradient)).max(-1)[:, 0] > 0
    segments = np.asarray(batch["segment_ids"])[0]
    position, other = np.arange(SEQ_LEN - 1)[:, None], np.arange(SEQ_LEN)[None]
    predicts = (segments[:-1] == segments[1:]) & (segments[1:] > 0)
    own = (segments[:-1, None] == segments[None]) & predicts[:, None]
    assert predicts.sum() == sum(LENGTHS) - 3
    np.testing.assert_array_equal(reached, own & (other <= position) if config.direction == "causal" else own)
