"""Replaced-token detection: samples, labels, gradients, embeddings of two models, and metrics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import Config, ModelConfig, ObjectiveConfig, Phase
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.generator import discriminator_params, generator_params
from bert_jax.objectives import replaced_tokens
from bert_jax.objectives.replaced_tokens import logit_histogram, logit_sums, place_tokens, sample_tokens
from bert_jax.training.eval_metrics import area_under_curve, derive_metrics
from bert_jax.training.param_paths import name_leaves
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs, combine, make_train_step, put_step_inputs
from bert_jax.training.sharding import make_mesh
from tests.objectives.masking_batches import ORDINARY, VOCABULARY, make_batch

pytestmark = pytest.mark.usefixtures("quick_compilation")

RTD = ObjectiveConfig(
    token="rtd", pair="none", mask_rate=0.25, mask_token_share=0.85, random_token_share=0.0, generator_width=0.5
)
MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=32, embedding_size=24
)
CONFIG = Config(name="x", model=MODEL, objective=RTD, phases=(Phase(steps=4, seq_len=32, batch_size=4),))
SEED = jnp.uint32(3)
PACKS = [[(1, 20), (2, 12)], [(3, 30)], [(4, 9), (5, 9)], [(6, 25)]]


prepare = functools.partial(jax.jit, static_argnums=0)(Pretraining.prepare)
sums = functools.partial(jax.jit, static_argnums=0)(Pretraining.sums)


@functools.cache
def task_with(embeddings: str = "shared", **changes) -> Pretraining:
    objective = dataclasses.replace(RTD, generator_embeddings=embeddings, **changes)
    return Pretraining(dataclasses.replace(CONFIG, objective=objective), VOCABULARY)


@functools.cache
def params_of(embeddings: str):
    """Random parameters: differences of tables and biases are not 0."""
    shapes = jax.eval_shape(task_with(embeddings).init_params, jax.random.key(0))
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.3, leaf.shape), jnp.float32), shapes)


def prepared(packs=PACKS, embeddings: str = "shared") -> dict:
    return prepare(task_with(embeddings), make_batch(packs, 32, slots=2), SEED)


def samples_by_place(batch: dict, sampled: np.ndarray) -> dict[tuple[int, int], int]:
    """By example and offset in it."""
    batch, found = jax.tree.map(np.asarray, batch), {}
    for row, slot in np.argwhere(batch["target_weights"] > 0):
        place = batch["target_positions"][row, slot]
        example = batch["example_id"][row, batch["segment_ids"][row, place] - 1]
        found[int(example), int(batch["position_ids"][row, place])] = int(sampled[row, slot])
    return found


def test_samples_depend_on_example_offset_epoch_and_seed_only():
    """Not on the row, its other examples, or the batch; of one distribution everywhere, so that only keys count."""
    logits = jnp.zeros(64)

    def samples(packs, epoch=0, seed=SEED):
        batch = prepare(task_with(), make_batch(packs, 32, epoch, slots=2), seed)
        keys = batch["sample_keys"]
        return samples_by_place(batch, np.asarray(sample_tokens(jnp.broadcast_to(logits, (*keys.shape, 64)), keys)))

    found = samples(PACKS)
    assert len(found) > 20 and len(set(found.values())) > 12
    repacked = samples([[(6, 25)], [(2, 12), (4, 9)], [(1, 20)], [(5, 9)], [(3, 30)]])
    assert repacked == found
    for others in (samples(PACKS, epoch=1), samples(PACKS, seed=SEED + 1)):
        common = found.keys() & others.keys()
        assert sum(found[place] == others[place] for place in common) <= 2 + len(common) // 8


def test_samples_follow_the_softmax():
    """40,000 keys, five tokens; deviations of four standard errors."""
    logits = jnp.array([2.0, 0.0, -1.0, 1.0, -9.0])
    keys = jnp.arange(40_000, dtype=jnp.uint32).reshape(1, -1) * jnp.uint32(2654435761)
    counts = np.bincount(np.ravel(sample_tokens(jnp.broadcast_to(logits, (1, 40_000, 5)), keys)), minlength=5)
    expected = np.asarray(jax.nn.softmax(logits))
    assert (np.abs(counts / 40_000 - expected) < 4 * np.sqrt(expected * (1 - expected) / 40_000) + 1e-9).all()


def test_masks_have_no_random_tokens():
    """85 % [MASK], 15 % unchanged, also where the evaluation masks."""
    plain = make_batch([[(i, 32)] for i in range(200)], 32)
    for seed, share in ((SEED, 0.25), (None, 0.15)):
        batch = jax.tree.map(np.asarray, prepare(task_with(), plain, seed))
        chosen = batch["target_weights"] > 0
        assert chosen.sum() == 200 * round(share * 32)
        kept = np.take_along_axis(batch["input_ids"], batch["target_positions"], 1)[chosen]
        is_mask = kept == VOCABULARY.mask_id
        assert abs(is_mask.mean() - 0.85) < 0.04
        np.testing.assert_array_equal(kept[~is_mask], batch["target_labels"][chosen][~is_mask])


def test_rows_of_the_discriminator():
    """By loops: a token at every target; replaced where it is another; everything else is the original."""
    plain, batch = make_batch(PACKS, 32, slots=2), prepared()
    sampled = np.asarray(ORDINARY)[np.random.default_rng(1).integers(0, 4, batch["target_labels"].shape)]
    sampled[0, 0] = batch["target_labels"][0, 0]  # right by chance
    found = jax.tree.map(np.asarray, place_tokens(batch, jnp.asarray(sampled, jnp.int32)))
    expected, labels = np.array(plain["input_ids"]), np.zeros((4, 32), np.float32)
    for row, slot in np.argwhere(found["target_weights"] > 0):
        place = found["target_positions"][row, slot]
        labels[row, place] = expected[row, place] != sampled[row, slot]
        expected[row, place] = sampled[row, slot]
    np.testing.assert_array_equal(found["input_ids"], expected)
    np.testing.assert_array_equal(found["is_replaced"], labels)
    first = found["target_positions"][0, 0]
    assert labels.sum() > 10 and labels[0, first] == 0 and not labels[np.asarray(plain["segment_ids"]) == 0].any()


def gradients(embeddings: str) -> list[dict[str, float]]:
    """Largest absolute gradients of the losses of the discriminator and of the generator by parameter."""
    task, batch = task_with(embeddings), prepared(embeddings=embeddings)

    def losses(params):
        found = task.sums(params, batch, DropoutKey(jnp.uint32(1), jnp.arange(4)))
        return found["rtd_loss"].sum, found["generator_loss"].sum

    @jax.jit
    def of_both(params):
        backward = jax.vjp(losses, params)[1]
        return [backward(one)[0] for one in ((1.0, 0.0), (0.0, 1.0))]

    found = of_both(params_of(embeddings))
    return [{name: float(jnp.abs(leaf).max()) for name, leaf in name_leaves(one).items()} for one in found]


def test_no_gradient_passes_through_the_samples():
    """The discriminator's loss reaches the generator's own parameters in no mode, common tables only where shared."""
    for embeddings in ("shared", "disentangled"):
        of_rtd, of_generator = gradients(embeddings)
        is_generator = {name: name.startswith("generator/") for name in of_rtd}
        assert any(is_generator.values())
        assert {name for name, size in of_rtd.items() if size > 0} == {n for n in of_rtd if not is_generator[n]}
        reached = {name for name, size in of_generator.items() if size > 0}
        tables = {f"encoder/embeddings/{name}" for name in ("word", "position", "token_type")}
        tables |= {"encoder/embeddings/norm/scale", "encoder/embeddings/norm/bias"}
        own = {name for name in of_generator if is_generator[name]}
        assert reached == (own | tables if embeddings == "shared" else own)


def test_embeddings_of_both_models():
    shared, apart = params_of("shared"), params_of("disentangled")
    for params, mode in ((shared, "shared"), (apart, "disentangled")):
        discriminator, generator = discriminator_params(params, mode), generator_params(params, mode)
        assert "generator" not in discriminator and generator.keys() == {"encoder", "mlm"}
        for name in ("word", "position", "token_type"):
            table, other = (one["encoder"]["embeddings"][name] for one in (discriminator, generator))
            difference = 0.0 if mode == "shared" else np.asarray(params["encoder"]["embeddings"][name])
            np.testing.assert_array_equal(table, np.asarray(other) + difference)
    assert name_leaves(shared).keys() & name_leaves(apart).keys() == name_leaves(shared).keys()
    assert set(shared["generator"]["encoder"]["embeddings"]) == {"projection"}
    start = task_with("disentangled").init_params(jax.random.key(0))
    assert not any(np.any(start["encoder"]["embeddings"][name]) for name in ("word", "position", "token_type"))
    # numpy arrays, as read from a checkpoint, are added with the same rounding
    folded = discriminator_params(jax.tree.map(np.asarray, apart), "disentangled")
    for name, leaf in name_leaves(discriminator_params(apart, "disentangled")).items():
        np.testing.assert_array_equal(name_leaves(folded)[name], leaf)


def test_the_loss_weighs_its_terms():
    """Generator + 50 discriminator, each a mean over its own tokens, also for fewer than 50 tokens."""
    batch = prepared([[(1, 9)]])
    task, light = task_with(), task_with(discriminator_weight=2.0)
    found = sums(task, params_of("shared"), batch, None)
    generator, rtd = (found[f"{name}_loss"] for name in ("generator", "rtd"))
    assert (int(generator.weight), int(rtd.weight)) == (2, 9)
    for one, factor in ((task, 50.0), (light, 2.0)):
        expected = generator.sum / 2 + factor * rtd.sum / 9
        np.testing.assert_allclose(combine(found, one.loss_weight_sums(batch)), expected, rtol=1e-6)


@pytest.mark.slow
def test_micro_batches_sample_the_same_tokens():
    """Counts of replaced and of correctly detected tokens are equal; losses to rounding."""
    rows = {**make_batch(PACKS, 32, slots=2), "row": jnp.arange(4, dtype=jnp.int32)}
    task = task_with()
    mesh = make_mesh(task.config.mesh, jax.devices()[:1])
    programs, found = Programs(task, mesh), []
    for accumulation in (1, 4):
        step = make_train_step(task, programs.abstract_state(0), accumulation)
        found.append(step(programs.init_state(), rows, put_step_inputs(1e-3, accumulation, 3, mesh))[1])
    one, four = ({name: np.asarray(value) for name, value in metrics.items()} for metrics in found)
    assert 0 < one["rtd_replaced"] < 0.3
    for name in ("rtd_replaced", "generator_accuracy", "rtd_histogram"):
        np.testing.assert_allclose(one[name], four[name], rtol=1e-6, atol=1e-7, err_msg=name)
    for name in ("generator_loss", "rtd_loss", "loss", "gradient_norm"):
        np.testing.assert_allclose(one[name], four[name], rtol=1e-5, err_msg=name)


def test_metrics_are_those_of_sklearn():
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    labels = (random.random((8, 64)) < 0.15).astype(np.float32)
    logits = np.round(random.normal(2.5 * labels - 1.5, 1.5), 2).astype(np.float32)
    segments = np.where(np.arange(64)[None] < random.integers(20, 64, (8, 1)), 1, 0)
    labels *= segments.astype(np.float32)
    real = segments > 0
    parts = logit_sums("rtd", jnp.asarray(logits), jnp.asarray(labels), jnp.asarray(real, jnp.float32))
    found = derive_metrics({name: np.asarray(one.sum / one.weight).tolist() for name, one in parts.items()})
    truth, scores = labels[real], logits[real]
    expected = {
        "rtd_loss": metrics.log_loss(truth, 1 / (1 + np.exp(-scores.astype(np.float64)))),
        "rtd_accuracy": metrics.accuracy_score(truth, scores > 0),
        "rtd_precision": metrics.precision_score(truth, scores > 0),
        "rtd_recall": metrics.recall_score(truth, scores > 0),
        "rtd_replaced": truth.mean(),
    }
    assert found.keys() == {*expected, "rtd_auc"}
    for name, value in expected.items():
        np.testing.assert_allclose(float(found[name]), value, rtol=1e-5, err_msg=name)
    # Exactly that of logits rounded to bins, and within 1e-4 of that of the logits.
    bins = np.floor((scores.astype(np.float64) + 16) * 512)
    np.testing.assert_allclose(found["rtd_auc"], metrics.roc_auc_score(truth, bins), rtol=1e-6)
    np.testing.assert_allclose(found["rtd_auc"], metrics.roc_auc_score(truth, scores), atol=1e-4)


def test_the_histogram_holds_every_logit():
    """Far ones in the outer bins; weights of 0 nowhere; no area without both classes."""
    logits = jnp.array([[-1e9, -16.0, -0.001, 0.0, 1e9, 3.0]])
    labels, weights = jnp.array([[0.0, 0, 0, 1, 1, 1]]), jnp.array([[1.0, 1, 1, 1, 1, 0]])
    counts = np.asarray(logit_histogram(logits, labels, weights))
    assert counts.shape == (2, replaced_tokens.BINS)
    assert {(int(a), int(b)): int(counts[a, b]) for a, b in np.argwhere(counts)} == {
        (0, 0): 2,
        (0, 8191): 1,
        (1, 8192): 1,
        (1, 16383): 1,
    }
    assert area_under_curve(counts) == 1.0 and area_under_curve(counts[::-1]) == 0.0
    assert "rtd_auc" not in derive_metrics({"rtd_histogram": counts * np.array([[1.0], [0.0]])})
