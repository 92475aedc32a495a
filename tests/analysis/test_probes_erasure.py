"""LEACE: a twin, planted concepts that no linear probe finds afterwards, and erasure inside a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from bert_jax.analysis.probes import erasure
from bert_jax.analysis.probes.leace import Eraser, control_eraser, fit_leace, random_eraser, whiten
from bert_jax.analysis.probes.linear import fit_and_score
from bert_jax.analysis.probes.vectors import draw_sentences
from bert_jax.analysis.treebank import read_splits
from bert_jax.interventions.capture import analysis_config, capture
from bert_jax.interventions.rows import batches
from bert_jax.model import bert
from bert_jax.model.activations import Edit
from bert_jax.model.heads import Heads
from tests.analysis import data_folder
from tests.interventions.models import LAYERS, small_model

pytestmark = pytest.mark.usefixtures("quick_compilation")
CLASSES, WIDTH = 4, 12
PROBE = {"epochs": 20, "penalty": 1.0, "seed": 0}


@pytest.fixture(scope="module")
def concept():
    """Correlated vectors with a concept in them; balanced labels."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(2000) % CLASSES)
    vectors = rng.normal(size=(2000, WIDTH)) + 3 * rng.normal(size=(CLASSES, WIDTH))[labels]
    return (vectors @ rng.normal(size=(WIDTH, WIDTH)) + 5).astype(np.float32), labels


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    data = epath.Path(data_folder.write(tmp_path_factory.mktemp("erasure") / "data"))
    splits, model = read_splits(list((data / "treebank").iterdir())), small_model()
    found = []
    for split, count in (("train", 24), ("dev", 6)):
        rng = np.random.default_rng(0)
        sample = draw_sentences(splits[split], lambda one: one.words, model.tokenizer, 64, count, rng, split)
        found.append(erasure.mask(sample, ("ADJ", "ADP", "DET", "NOUN", "VERB"), model, 0.2, 0))
    return found


def reference_projection(vectors, labels):
    """P = S_xz (S_zx S_xx^-1 S_xz)^+ S_zx S_xx^-1, float64, for vectors of full rank; S_xx^-1 by QR of the vectors."""
    x, z = vectors - vectors.mean(0, dtype=np.float64), np.eye(labels.max() + 1)[labels]
    factor = np.linalg.qr(x / np.sqrt(len(x)), mode="r")
    xz = x.T @ (z - z.mean(0)) / len(x)
    solved = np.linalg.solve(factor, np.linalg.solve(factor.T, xz))
    return xz @ np.linalg.pinv(xz.T @ solved, rcond=1e-9) @ solved.T


def test_leace_equals_the_formula_with_inverses(concept):
    vectors, labels = concept
    found = fit_leace(whiten(vectors), labels, CLASSES)
    np.testing.assert_allclose(found.projection, reference_projection(vectors, labels), atol=1e-9)
    np.testing.assert_allclose(found.projection @ found.projection, found.projection, atol=1e-9)
    assert found.rank == CLASSES - 1


@pytest.mark.parametrize("smallest", [1e-3, 1e-7])
def test_a_concept_in_directions_of_low_variance_is_erased(smallest):
    """Deviations from 1 to `smallest`, with the concept in the smallest ones, too."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(600) % CLASSES)
    rotation = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0]
    whitened = rng.normal(size=(600, WIDTH)) + 3 * rng.normal(size=(CLASSES, WIDTH))[labels]
    vectors = whitened * np.geomspace(1, smallest, WIDTH) @ rotation.T + 5
    leace = fit_leace(whiten(vectors), labels, CLASSES)
    expected = reference_projection(vectors, labels)
    np.testing.assert_allclose(leace.projection, expected, atol=1e-9 / smallest * abs(expected).max())
    erased = leace(vectors) @ rotation / np.geomspace(1, smallest, WIDTH)
    means = np.stack([erased[labels == label].mean(0) for label in range(CLASSES)])
    np.testing.assert_allclose(means - erased.mean(0), 0, atol=1e-16 / smallest**2 + 1e-9)


def test_a_linear_probe_is_at_chance_after_leace(concept):
    vectors, labels = concept
    whitening = whiten(vectors)
    leace = fit_leace(whitening, labels, CLASSES)
    erasers = leace, random_eraser(whitening, leace.rank, [0]), control_eraser(whitening, labels, CLASSES, [0])
    scores = [
        fit_and_score(x, x, labels, labels, CLASSES, **PROBE) for x in (vectors, *(one(vectors) for one in erasers))
    ]
    assert scores[0] > 0.95 and scores[2] > 0.8 and scores[3] > 0.8
    assert abs(scores[1] - 1 / CLASSES) < 0.03
    erased = leace(vectors).astype(np.float64)
    means = np.stack([erased[labels == label].mean(0) for label in range(CLASSES)])
    np.testing.assert_allclose(means - erased.mean(0), 0, atol=1e-4)


def test_erased_dimensions_are_few(concept):
    """What is orthogonal to the concept in the whitened space remains; the mean remains, too."""
    vectors, labels = concept
    whitening = whiten(vectors)
    leace = fit_leace(whitening, labels, CLASSES)
    np.testing.assert_allclose(leace(vectors).mean(0), vectors.mean(0), atol=1e-3)
    changes = np.linalg.svd(leace.offsets(vectors).astype(np.float64), compute_uv=False)
    assert (changes > 1e-3 * changes[0]).sum() == CLASSES - 1
    random = np.linalg.svd(random_eraser(whitening, 2, [0]).projection, compute_uv=False)
    assert (random > 1e-6).sum() == 2


def test_a_random_subspace_is_uniform_in_the_whitened_space():
    """Its expected share of the variance is rank / dimensions, however the variances differ."""
    rng = np.random.default_rng(0)
    deviations = np.geomspace(1, 1e-3, 16)
    vectors = rng.normal(size=(2000, 16)) * deviations @ np.linalg.qr(rng.normal(size=(16, 16)))[0]
    whitening = whiten(vectors)
    shares = [random_eraser(whitening, 4, [seed]).variance_removed(vectors) for seed in range(400)]
    assert np.mean(shares) == pytest.approx(4 / 16, abs=4 * np.std(shares) / 20)
    # Of every principal direction, not only of those with a high variance.
    removed = [random_eraser(whitening, 4, [seed]).offsets(vectors) @ whitening.to_coordinates.T for seed in range(100)]
    np.testing.assert_allclose(np.mean([one.var(0) for one in removed], axis=0), 4 / 16, atol=0.07)


def test_control_erasers_have_the_rank_and_not_the_concept(concept):
    vectors, labels = concept
    whitening = whiten(vectors)
    first, again, other = (control_eraser(whitening, labels, CLASSES, [seed]) for seed in (0, 0, 1))
    assert first.rank == other.rank == CLASSES - 1
    np.testing.assert_array_equal(first.projection, again.projection)
    assert abs(first.projection - other.projection).max() > 0.1
    assert first.variance_removed(vectors) < fit_leace(whitening, labels, CLASSES).variance_removed(vectors)


def test_vectors_in_a_subspace():
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 2
    vectors = (rng.normal(size=(200, 3)) + labels[:, None]) @ rng.normal(size=(3, 8))
    whitening = whiten(vectors)
    assert whitening.coordinates.shape == (200, 3)
    erased = fit_leace(whitening, labels, 2)(vectors)
    np.testing.assert_allclose(erased[labels == 0].mean(0), erased[labels == 1].mean(0), atol=1e-9)
    assert fit_leace(whitening, np.zeros(200, int), 2).rank == 0


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_constant_vectors_have_nothing_to_erase(value):
    vectors, labels = np.full((9, 4), value, np.float32), np.arange(9) % 3
    whitening = whiten(vectors)
    leace = fit_leace(whitening, labels, 3)
    for eraser in (leace, random_eraser(whitening, leace.rank, [0]), control_eraser(whitening, labels, 3, [0])):
        assert eraser.rank == 0 and eraser.variance_removed(vectors) == 0
        np.testing.assert_array_equal(eraser(vectors), vectors)


def test_masks_and_labels(masked):
    train, _ = masked
    model = small_model()
    for row, positions, originals, labels in zip(*train[:4], strict=True):
        assert (row.input_ids[positions] == model.tokenizer.mask_id).all() and len(positions) >= 1
        assert (originals != model.tokenizer.mask_id).all() and (labels[[0, -1]] == -1).all()
        names = [train.names[label] for label in labels[1:-1] if label >= 0]
        assert names[0] == "DET" and "VERB" in names


def erasers_of(model, masked, change):
    rng = np.random.default_rng(0)
    width = model.config.hidden_size
    one = lambda: Eraser(rng.normal(size=width), change * rng.normal(size=(width, width)), 2)  # noqa: E731
    return [{"leace": [one()], "control": [one()], "random": [one(), one()]} for _ in range(LAYERS)]


def test_an_eraser_of_nothing_changes_nothing(masked):
    found = erasure.mlm_scores(small_model(), masked[1], erasers_of(small_model(), masked[1], 0.0))
    for losses in found["loss_nats"].values():
        np.testing.assert_allclose(losses, np.full_like(losses, found["loss_nats"]["none"][0][0]), rtol=1e-6)
    assert found["masked_tokens"] == sum(map(len, masked[1].positions))
    for rise in found["rise_nats"].values():
        np.testing.assert_allclose(list(rise.values()), 0, atol=1e-6)


def test_erasure_in_the_last_layer_is_the_head_on_erased_vectors(masked):
    model, dev = small_model(), masked[1]
    erasers = erasers_of(model, dev, 0.3)
    found = erasure.mlm_scores(model, dev, erasers)
    network = bert.model_from_params(
        analysis_config(model.config), model.heads, jax.tree.map(jnp.asarray, model.params)
    )
    losses = []
    for row, positions, originals in zip(dev.rows, dev.positions, dev.originals, strict=True):
        (batch,) = batches([row], model.tokenizer.pad_id, 64)
        hidden = capture(model, batch, ["hidden_states"])["hidden_states"][-1][:, positions]
        logits = network.mlm(jnp.asarray(erasers[-1]["random"][1](hidden)), network.encoder.embeddings.word[...])[0]
        log_p = jax.nn.log_softmax(logits[:, : model.tokenizer.vocab_size])
        losses += (-log_p[np.arange(len(originals)), originals]).tolist()
    np.testing.assert_allclose(found["loss_nats"]["random"][-1][1], np.mean(losses), rtol=1e-4)
    means = {name: np.array(of).mean(1) for name, of in found["loss_nats"].items()}
    for name, less in (("random", "none"), ("leace_minus_control", "control")):
        rise = found["rise_nats"][name]
        np.testing.assert_allclose(rise["value"], means[name.split("_")[0]] - means[less], atol=1e-5)
        assert (rise["low"] < rise["value"]).all() and (rise["value"] < rise["high"]).all()
    assert len(np.unique(np.round(found["loss_nats"]["random"], 4))) == 2 * LAYERS


def test_special_tokens_are_not_erased(masked):
    model, dev = small_model(), masked[1]
    erasers = erasers_of(model, dev, 0.3)
    found = erasure.mlm_scores(model, dev, erasers)
    losses = []
    for row, positions, originals in zip(dev.rows, dev.positions, dev.originals, strict=True):
        (batch,) = batches([row], model.tokenizer.pad_id, 64)
        hidden = capture(model, batch, ["layers.*.hidden"])["layers.*.hidden"]
        changes = np.zeros_like(hidden)
        words = np.arange(1, len(row.input_ids) - 1)
        changes[0, :, words] = erasers[0]["leace"][0].offsets(hidden[0, :, words])
        logits = capture(model, batch, ["mlm_logits"], edits={"hidden": Edit(offset=changes)})["mlm_logits"][0]
        log_p = jax.nn.log_softmax(logits[positions, : model.tokenizer.vocab_size])
        losses += (-log_p[np.arange(len(originals)), originals]).tolist()
    np.testing.assert_allclose(found["loss_nats"]["leace"][0][0], np.mean(losses), rtol=1e-4)


def test_measured_in_every_layer(masked):
    found = erasure.measure(small_model(), *masked, draws=2, penalty=1.0, seed=0, progress=False)
    assert found["ranks"] == [4] * LAYERS and np.shape(found["mlm"]["loss_nats"]["leace"]) == (LAYERS, 1)
    probe, variance = found["probe_accuracy"], found["variance_removed"]
    assert np.min(probe["none"]) > np.max(probe["leace"])
    for name in ("control", "random"):
        assert np.shape(probe[name]) == np.shape(found["mlm"]["accuracy"][name]) == (LAYERS, 2)
        assert (np.array(variance[name]) > 0).all() and (np.array(variance[name]) < 1).all()
        assert (np.diff(variance[name]) != 0).all()
    assert variance["none"] == [[0.0]] * LAYERS
    assert found["scored_tokens"] == sum((labels >= 0).sum() for labels in masked[1].labels)


def test_without_an_mlm_head_only_probes_are_scored(masked):
    model = small_model(Heads(mlm=False, pair=True))
    assert erasure.measure(model, *masked, draws=1, penalty=1.0, seed=0, progress=False)["mlm"] is None
