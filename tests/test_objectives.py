"""Masking and losses. Seeds are fixed; statistical thresholds state what chance would exceed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.config import ModelConfig, ObjectiveConfig
from bert_jax.model import pretraining
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.layers import fold
from bert_jax.objectives import Vocabulary, loss_weights, mask_tokens, prediction_counts, pretraining_sums

pytestmark = pytest.mark.usefixtures("quick_compilation")

ALPHA = 1e-4
PAD, UNK, CLS, SEP, MASK = 0, 7, 30, 31, 60
VOCABULARY = Vocabulary(size=64, mask_id=MASK, special_ids=(PAD, UNK, CLS, SEP, MASK))
ORDINARY = np.setdiff1d(np.arange(64), VOCABULARY.special_ids)
OBJECTIVE = ObjectiveConfig()
KEY = fold(jnp.uint32(0), 1)

masked = functools.partial(jax.jit, static_argnums=(2, 3))(mask_tokens)


def make_batch(packs: list[list[tuple[int, int]]], seq_len: int, epoch: int = 0, slots: int | None = None) -> dict:
    """Rows of packed examples, each (example id, length); what an example says hangs on its id alone."""
    slots = slots or max(map(len, packs))
    shape = len(packs), seq_len
    batch = {n: np.zeros(shape, np.int32) for n in ("segment_ids", "position_ids", "token_type_ids")}
    batch["input_ids"] = np.full(shape, PAD, np.int32)
    batch |= {n: np.zeros((len(packs), slots), np.int32) for n in ("pair_labels", "cls_positions")}
    batch["example_id"] = np.full((len(packs), slots), -1, np.int32)
    batch["mask_epoch"] = np.full(len(packs), epoch, np.int32)
    for row, pack in enumerate(packs):
        start = 0
        for k, (example, length) in enumerate(pack):
            here = slice(start, start + length)
            tokens = np.random.default_rng(example).choice(ORDINARY, length)
            tokens[0], tokens[length // 2], tokens[-1] = CLS, SEP, SEP
            batch["input_ids"][row, here] = tokens
            batch["segment_ids"][row, here], batch["position_ids"][row, here] = k + 1, np.arange(length)
            batch["token_type_ids"][row, start + length // 2 + 1 : start + length] = 1
            batch["example_id"][row, k], batch["cls_positions"][row, k] = example, start
            batch["pair_labels"][row, k] = example % 2
            start += length
    return {name: jnp.asarray(array) for name, array in batch.items()}


def predictions(before: dict, after: dict, row: int, slot: int) -> dict[int, tuple[int, int]]:
    """Offset inside the example -> (label, what is shown), for one example."""
    after = jax.tree.map(np.asarray, after)
    found = {}
    for position, label, weight in zip(
        after["masked_positions"][row], after["masked_labels"][row], after["masked_weights"][row], strict=True
    ):
        if weight and before["segment_ids"][row, position] == slot + 1:
            offset = int(before["position_ids"][row, position])
            assert offset not in found
            found[offset] = int(label), int(after["input_ids"][row, position])
    return found


def test_prediction_counts():
    counts = prediction_counts(0.15, 512)
    assert counts.shape == (513,) and counts.dtype == np.int32
    assert [int(counts[n]) for n in (0, 1, 3, 10, 128, 512)] == [0, 1, 1, 2, 19, 77]
    assert (np.diff(counts) >= 0).all()


def test_exact_number_never_special_never_padding():
    lengths = (40, 39, 20, 5, 3)
    before = make_batch([[(i, n)] for i, n in enumerate(lengths)], 40)
    after = jax.tree.map(np.asarray, masked(before, KEY, OBJECTIVE, VOCABULARY))
    ids = np.asarray(before["input_ids"])
    assert after["masked_positions"].shape == (5, 6)
    for row, length in enumerate(lengths):
        real = after["masked_weights"][row] > 0
        # The example of three has no ordinary token at all: [CLS] [SEP] [SEP].
        expected = {40: 6, 39: 6, 20: 3, 5: 1, 3: 0}[length]
        assert real.sum() == expected and (real == (np.arange(6) < expected)).all()
        positions = after["masked_positions"][row][real]
        assert (np.diff(positions) > 0).all() and (positions < length).all()
        assert not np.isin(ids[row, positions], VOCABULARY.special_ids).any()
        np.testing.assert_array_equal(after["masked_labels"][row][real], ids[row, positions])
        untouched = np.setdiff1d(np.arange(40), positions)
        np.testing.assert_array_equal(after["input_ids"][row, untouched], ids[row, untouched])
        assert set(after["masked_weights"][row].tolist()) <= {0.0, 1.0}
    for name in before.keys() - {"input_ids"}:
        np.testing.assert_array_equal(after[name], before[name])


def test_too_few_ordinary_tokens_are_all_predicted():
    before = make_batch([[(1, 10)]], 12)
    before["input_ids"] = jnp.where(before["position_ids"] == 3, 5, CLS) * (before["segment_ids"] > 0)
    after = masked(before, KEY, ObjectiveConfig(mask_rate=0.5), VOCABULARY)
    assert list(predictions(before, after, 0, 0)) == [3]


@pytest.fixture(scope="module")
def many():
    """2,048 full rows of 128 tokens: 38,912 predictions among 262,144 tokens; labels, what is shown, offsets."""
    before = make_batch([[(i, 128)] for i in range(2048)], 128)
    after = jax.tree.map(np.asarray, masked(before, KEY, OBJECTIVE, VOCABULARY))
    assert (after["masked_weights"] == 1).all() and after["masked_weights"].shape == (2048, 19)
    shown = np.take_along_axis(after["input_ids"], after["masked_positions"], axis=1)
    return after["masked_labels"].ravel(), shown.ravel(), after["masked_positions"]


def test_shares_of_mask_random_and_kept(many):
    """Chi-square at alpha 1e-4: 80 % [MASK], 10 % random, 10 % kept; a random draw can hit the original."""
    labels, shown, _ = many
    hidden, same = (shown == MASK).sum(), (shown == labels).sum()
    n, hit = len(labels), 1 / len(ORDINARY)
    observed = np.array([hidden, same, n - hidden - same])
    expected = n * np.array([0.8, 0.1 + 0.1 * hit, 0.1 * (1 - hit)])
    assert stats.chisquare(observed, expected).pvalue > ALPHA
    # A share of 75 or 85 % would be noticed: the test has teeth.
    assert stats.chisquare(observed, n * np.array([0.79, 0.105, 0.105])).pvalue < ALPHA


def test_random_tokens_are_uniform_over_ordinary_ids(many):
    labels, shown, _ = many
    drawn = shown[(shown != MASK) & (shown != labels)]
    assert len(drawn) > 3000 and not np.isin(drawn, VOCABULARY.special_ids).any()
    counts = np.bincount(drawn, minlength=64)[ORDINARY]
    assert stats.chisquare(counts).pvalue > ALPHA


def test_positions_are_uniform(many):
    """Each example picks 19 of its 125 ordinary offsets: 0, 64 and 127 never, the rest alike (alpha 1e-4)."""
    _, _, positions = many
    counts = np.bincount(positions.ravel(), minlength=128)
    assert (counts[[0, 64, 127]] == 0).all()
    counts = np.delete(counts, [0, 64, 127])
    # Drawn without replacement: the statistic is smaller than chi-square by (1 - 19 / 125).
    expected = positions.size / 125
    statistic = np.square(counts - expected).sum() / expected / (1 - 19 / 125)
    assert ALPHA < stats.chi2.sf(statistic, 124) < 1 - ALPHA


def test_neighbouring_positions_are_chosen_independently(many):
    """Adjacent ordinary positions are both chosen as often as two draws of 19 from 125 say, within 5 deviations."""
    _, _, positions = many
    adjacent = (np.diff(positions, axis=1) == 1).sum()
    pairs = 127 - 4  # of neighbours without offsets 0, 64 and 127
    expected = 2048 * pairs * 19 * 18 / (125 * 124)
    assert abs(adjacent - expected) < 5 * np.sqrt(expected)


def test_masks_hang_on_example_and_epoch_only():
    """The same example alone, in another row, and as the second of a packed row at another offset."""
    alone = make_batch([[(5, 24)], [(9, 16)], [(11, 20)]], 48, epoch=3)
    packed = make_batch([[(11, 20), (5, 24)], [(9, 16), (4, 12)]], 48, epoch=3)
    masks = {}
    for name, batch in (("alone", alone), ("packed", packed)):
        after = masked(batch, KEY, OBJECTIVE, VOCABULARY)
        for row, ids in enumerate(np.asarray(batch["example_id"])):
            masks |= {(name, int(e)): predictions(batch, after, row, slot) for slot, e in enumerate(ids) if e >= 0}
    for example, count in ((5, 4), (9, 2), (11, 3)):
        assert masks["alone", example] == masks["packed", example] and len(masks["alone", example]) == count
    assert len(masks["packed", 4]) == 2


def test_other_epochs_seeds_and_examples_get_other_masks():
    base = make_batch([[(i, 48)] for i in range(8)], 48, epoch=0)
    later = base | {"mask_epoch": jnp.ones(8, jnp.int32)}
    renamed = base | {"example_id": base["example_id"] + 100}

    def chosen(batch, key):
        return np.asarray(masked(batch, key, OBJECTIVE, VOCABULARY)["masked_positions"])

    first = chosen(base, KEY)
    np.testing.assert_array_equal(first, chosen(base, KEY))
    for other in (chosen(later, KEY), chosen(renamed, KEY), chosen(base, fold(jnp.uint32(1), 1))):
        assert (first != other).any(axis=1).all()


def test_static_masks_need_only_equal_epochs():
    """`mask_epoch` is what decides; the batch's other numbers (row) do not."""
    base = make_batch([[(2, 48)], [(3, 48)]], 48)
    one = masked(base | {"row": jnp.array([0, 1])}, KEY, OBJECTIVE, VOCABULARY)
    two = masked(base | {"row": jnp.array([7, 8])}, KEY, OBJECTIVE, VOCABULARY)
    np.testing.assert_array_equal(one["input_ids"], two["input_ids"])


CONFIG = ModelConfig(vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24, max_positions=48)


@functools.lru_cache
def parameters(pair: bool):
    params = jax.jit(lambda key: pretraining.init(CONFIG, key, pair=pair))(jax.random.key(1))
    return jax.tree.map(
        lambda x: x + 0.2 * np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32), params
    )


@jax.jit
def sums_of(params, batch):
    return pretraining_sums(pretraining.bind(CONFIG, params), batch, None)


@jax.jit
def logits_of(params, batch):
    """Of every position, and of every slot."""
    model = pretraining.bind(CONFIG, params)
    output = model.encoder(EncoderInputs(*(batch[name] for name in EncoderInputs._fields)))
    return model.mlm(output.hidden, model.encoder.embeddings.attend), model.pair(output.pooled)


def log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_losses_are_sums_and_counts():
    """Against numpy, on packed rows of which one has a slot without an example."""
    before = make_batch([[(11, 20), (5, 24)], [(9, 16)], []], 48)
    batch = masked(before, KEY, OBJECTIVE, VOCABULARY)
    params = parameters(True)
    sums = jax.tree.map(float, sums_of(params, batch))
    every, pair = map(np.asarray, logits_of(params, batch))
    logits = np.take_along_axis(every, np.asarray(batch["masked_positions"])[:, :, None], 1)
    real = np.asarray(batch["masked_weights"]) > 0
    labels = np.asarray(batch["masked_labels"])
    picked = np.take_along_axis(log_softmax(logits), labels[:, :, None], 2)[:, :, 0]
    assert real.sum() == 3 + 4 + 2
    np.testing.assert_allclose(sums["mlm_loss"], (-picked[real].sum(), 9), rtol=1e-5)
    np.testing.assert_allclose(sums["mlm_accuracy"], ((logits.argmax(-1) == labels)[real].sum(), 9))

    exists = np.asarray(batch["example_id"]) >= 0
    classes = np.asarray(batch["pair_labels"])
    picked = np.take_along_axis(log_softmax(pair), classes[:, :, None], 2)[:, :, 0]
    np.testing.assert_allclose(sums["pair_loss"], (-picked[exists].sum(), 3), rtol=1e-5)
    np.testing.assert_allclose(sums["pair_accuracy"], ((pair.argmax(-1) == classes)[exists].sum(), 3))
    weights = jax.tree.map(float, loss_weights(batch, OBJECTIVE))
    assert weights == {"mlm_loss": 9.0, "pair_loss": 3.0}


def test_without_a_pair_objective_there_are_no_pair_terms():
    batch = masked(make_batch([[(1, 48)]], 48), KEY, OBJECTIVE, VOCABULARY)
    assert set(sums_of(parameters(False), batch)) == {"mlm_loss", "mlm_accuracy"}
    assert set(loss_weights(batch, ObjectiveConfig(pair="none"))) == {"mlm_loss"}


def test_empty_rows_count_nothing():
    full = make_batch([[(1, 48)], [(2, 30)]], 48)
    padded = make_batch([[(1, 48)], [], [(2, 30)], []], 48)
    one, two = (sums_of(parameters(True), masked(batch, KEY, OBJECTIVE, VOCABULARY)) for batch in (full, padded))
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-5, err_msg=name)
    empty = sums_of(parameters(True), masked(make_batch([[], []], 48, slots=1), KEY, OBJECTIVE, VOCABULARY))
    assert all(float(part) == 0.0 for value in empty.values() for part in value)
