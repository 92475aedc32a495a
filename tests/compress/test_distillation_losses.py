"""Losses between student and teacher: planted values, weights, and twins in torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.compress import distillation_losses

SEGMENT_IDS = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0]], np.int32)
TOKENS = (SEGMENT_IDS > 0).astype(np.float32)
PAIRS = np.array((SEGMENT_IDS[:, :, None] == SEGMENT_IDS[:, None]) & (SEGMENT_IDS[:, None] > 0), np.float32)
VECTOR_LOSSES = ("mse", "normalised_mse", "cosine", "standardised_mse", "mse_of_means", "variance_l1")
ALL = {
    **{name: (getattr(distillation_losses, name), (2, 6, 8), TOKENS) for name in VECTOR_LOSSES},
    "soft_targets": (functools.partial(distillation_losses.soft_targets, temperature=3.0), (2, 6, 4), TOKENS),
    "attention_scores_mse": (distillation_losses.attention_scores_mse, (2, 3, 6, 6), PAIRS),
    "attention_kl": (distillation_losses.attention_kl, (2, 3, 6, 6), PAIRS),
    "similarity_mse": (distillation_losses.similarity_mse, (2, 6, 8), PAIRS),
}
"""Function, shape of both sides, weights."""


def random_sides(shape):
    rng = np.random.default_rng(0)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)


def sums(loss, *arrays):
    return loss(*map(jnp.asarray, arrays))


def mean(loss, *arrays):
    total, weight = sums(loss, *arrays)
    return total / weight


@pytest.mark.parametrize("name", ALL)
def test_padding_has_neither_value_nor_gradient(name):
    loss, shape, weights = ALL[name]
    student, teacher = random_sides(shape)
    is_attention = len(shape) == 4
    padding = np.argwhere(SEGMENT_IDS == 0)
    changed = student.copy()
    for row, position in padding:
        changed[(row, slice(None), position) if is_attention else (row, position)] = 50.0
    assert mean(loss, changed, teacher, weights) == mean(loss, student, teacher, weights)
    gradient = jax.grad(lambda x: mean(loss, x, teacher, weights))(jnp.asarray(student))
    for row, position in padding:
        index = (row, slice(None), position) if is_attention else (row, position)
        assert not np.any(gradient[index]) and np.any(gradient)


def test_planted_values():
    weights = np.array([1.0, 1.0, 0.0], np.float32)
    student = np.array([[3.0, 4.0], [1.0, 0.0], [9.0, 9.0]], np.float32)
    teacher = np.array([[3.0, 0.0], [-2.0, 0.0], [0.0, 0.0]], np.float32)
    assert sums(distillation_losses.mse, student, teacher, weights) == (16 / 2 + 9 / 2, 2.0)
    # Unit vectors (0.6, 0.8) and (1, 0); (1, 0) and (-1, 0).
    np.testing.assert_allclose(
        sums(distillation_losses.normalised_mse, student, teacher, weights), (0.4 + 2.0, 2.0), rtol=1e-6
    )
    np.testing.assert_allclose(sums(distillation_losses.cosine, student, teacher, weights), (0.4 + 2.0, 2.0), rtol=1e-6)
    even, sure = np.log(np.array([[0.5, 0.5]], np.float32)), np.log(np.array([[0.9, 0.1]], np.float32))
    expected = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    for factor in (1.0, 2.0):
        loss = functools.partial(distillation_losses.soft_targets, temperature=factor)
        total, _ = sums(loss, factor * even, factor * sure, weights[:1])
        np.testing.assert_allclose(total, factor**2 * expected, rtol=1e-5)


def test_planted_statistics():
    weights = np.array([1.0, 1.0, 0.0], np.float32)
    student = np.array([[1.0, 3.0], [4.0, 4.0], [9.0, 9.0]], np.float32)
    teacher = np.array([[-2.0, 4.0], [1.0, 3.0], [0.0, 0.0]], np.float32)
    # Means 2 and 4 beside 1 and 2; variances 1 and 0 beside 9 and 1; standardised (-1, 1) and (0, 0) beside (-1, 1).
    assert sums(distillation_losses.mse_of_means, student, teacher, weights) == (1.0 + 4.0, 2.0)
    assert sums(distillation_losses.variance_l1, student, teacher, weights) == (8.0 + 1.0, 2.0)
    np.testing.assert_allclose(
        sums(distillation_losses.standardised_mse, student, teacher, weights), (0.0 + 1.0, 2.0), atol=1e-5
    )


def test_divergence_of_planted_attention():
    """Two queries with two keys, of which the third token of the row is none."""
    pairs = np.zeros((1, 3, 3), np.float32)
    pairs[0, :2, :2] = 1
    teacher = np.log(np.array([[0.9, 0.1, 1.0], [0.5, 0.5, 1.0], [1.0, 1.0, 1.0]], np.float32))[None, None]
    total, weight = sums(distillation_losses.attention_kl, np.zeros((1, 1, 3, 3), np.float32), teacher, pairs)
    expected = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    np.testing.assert_allclose((total, weight), (expected, 2.0), rtol=1e-5)


def test_similarities_of_planted_vectors():
    """Two tokens that are orthogonal in the student and equal in the teacher, which is wider."""
    student = np.array([[[2.0, 0.0], [0.0, 2.0]]], np.float32)
    teacher = np.full((1, 2, 4), 1.0, np.float32)
    total, weight = sums(distillation_losses.similarity_mse, student, teacher, np.ones((1, 2, 2), np.float32))
    # Student 2 on the diagonal and 0 elsewhere, teacher 1 everywhere.
    assert (total, weight) == (4.0, 4.0)


def test_pairs_of_the_same_example():
    found = np.asarray(distillation_losses.same_example(jnp.asarray(SEGMENT_IDS)))
    assert np.array_equal(found, PAIRS) and found.sum() == 2**2 + 3**2 + 4**2
    assert found[0, 0, 1] == 1 and found[0, 1, 2] == 0 and not found[0, 5].any() and not found[:, :, 5].any()


def test_gradients_of_zero_vectors_are_finite():
    zeros, teacher = np.zeros((1, 1, 8), np.float32), random_sides((1, 1, 8))[1]
    for loss in (distillation_losses.normalised_mse, distillation_losses.cosine):
        gradient = jax.grad(lambda x, loss=loss: sums(loss, x, teacher, np.ones((1, 1), np.float32)).sum)(
            jnp.asarray(zeros)
        )
        assert np.isfinite(gradient).all()


def torch_twins():
    """The losses of the papers' code on the items of weight 1, by name."""
    torch = pytest.importorskip("torch")
    functional, tokens, pairs = torch.nn.functional, torch.tensor(TOKENS > 0), torch.tensor(PAIRS > 0)

    def soft_targets(student, teacher):
        student, teacher = (x[tokens] / 3.0 for x in (student, teacher))
        log_probabilities = functional.log_softmax(student, -1)
        return functional.kl_div(log_probabilities, functional.softmax(teacher, -1), reduction="batchmean") * 9.0

    def cosine(student, teacher):
        target = torch.ones(int(tokens.sum()))
        return functional.cosine_embedding_loss(student[tokens], teacher[tokens], target)

    def normalised(student, teacher):
        return functional.mse_loss(*(functional.normalize(x[tokens], dim=-1) for x in (student, teacher)))

    def scores(student, teacher):
        return functional.mse_loss(*(x.permute(0, 2, 3, 1)[pairs] for x in (student, teacher)))

    def similarity(student, teacher):
        return functional.mse_loss(*((torch.bmm(x, x.transpose(1, 2)) / x.shape[2])[pairs] for x in (student, teacher)))

    def standardised(student, teacher):
        return functional.mse_loss(
            *(functional.layer_norm(x[tokens], x.shape[-1:], eps=1e-12) for x in (student, teacher))
        )

    def attention_kl(student, teacher):
        hidden = torch.where(pairs, 0.0, -torch.inf)[:, None]
        student, teacher = ((x + hidden).permute(0, 2, 1, 3)[tokens] for x in (student, teacher))
        log_probabilities = functional.log_softmax(student, -1).nan_to_num(neginf=0.0)
        divergences = functional.kl_div(log_probabilities, functional.softmax(teacher, -1), reduction="none").sum(-1)
        return divergences.mean()

    def variance(student, teacher):
        student, teacher = (x[tokens].var(-1, correction=0) for x in (student, teacher))
        return functional.l1_loss(student, teacher)

    return {
        "standardised_mse": standardised,
        "mse_of_means": lambda student, teacher: functional.mse_loss(
            student[tokens].mean(-1), teacher[tokens].mean(-1)
        ),
        "variance_l1": variance,
        "attention_kl": attention_kl,
        "mse": lambda student, teacher: functional.mse_loss(student[tokens], teacher[tokens]),
        "normalised_mse": normalised,
        "cosine": cosine,
        "soft_targets": soft_targets,
        "attention_scores_mse": scores,
        "similarity_mse": similarity,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_torch(name):
    torch = pytest.importorskip("torch")
    loss, shape, weights = ALL[name]
    student, teacher = random_sides(shape)
    value, gradient = jax.value_and_grad(lambda x: mean(loss, x, teacher, weights))(jnp.asarray(student))
    student_tensor = torch.tensor(student, requires_grad=True)
    expected = torch_twins()[name](student_tensor, torch.tensor(teacher))
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, student_tensor.grad.numpy(), rtol=1e-5, atol=1e-6)
