"""Optimizers against numpy, the table of treatments, and learning rates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import presets
from bert_jax.config import OptimizerConfig, Phase
from bert_jax.model import pretraining
from bert_jax.training.lamb import FLAVOURS
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.paths import name_leaves
from bert_jax.training.schedules import learning_rate
from bert_jax.training.treatment import Treatment, treatments

STEPS = 20
SCHEDULE = learning_rate((Phase(steps=STEPS, learning_rate=0.01, warmup_steps=5, batch_size=8),))
NAMES = {
    "encoder/embeddings/word": (11, 6),
    "encoder/embeddings/norm/scale": (6,),
    "encoder/layers/qkv/kernel": (2, 6, 3, 2, 3),
    "encoder/layers/qkv/bias": (2, 3, 2, 3),
    "encoder/layers/fall/kernel": (2, 5, 6),
    "encoder/layers/fall/bias": (2, 6),
    "mlm/bias": (11,),
}


def nest(flat):
    tree = {}
    for name, value in flat.items():
        *sections, last = name.split("/")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def logical_tensors(name, array):
    """The tensors that a paper would count, as views: each layer, and its query, key and value."""
    if "layers" not in name:
        return [array]
    layers = list(array)
    if "qkv/kernel" in name:
        return [layer[:, part] for layer in layers for part in range(3)]
    if "qkv/bias" in name:
        return [layer[part] for layer in layers for part in range(3)]
    return layers


def numpy_optimizer(config, params, gradients_of, lr):
    """AdamW, or LAMB by algorithm 2 with its flavours, one tensor at a time, in float64."""
    params = {name: array.astype(np.float64) for name, array in params.items()}
    m, v = ({name: np.zeros_like(array) for name, array in params.items()} for _ in range(2))
    lamb = config.name == "lamb"
    corrected = not lamb or config.lamb_flavour != "google"
    for step in range(STEPS):
        gradients = {name: g.astype(np.float64) for name, g in gradients_of(step).items()}
        norm = np.sqrt(sum(np.square(g).sum() for g in gradients.values()))
        if config.clip_norm is not None and norm > config.clip_norm:
            gradients = {name: g * config.clip_norm / norm for name, g in gradients.items()}
        for name in params:
            decayed = name.endswith(("kernel", "word"))
            m[name] = config.beta1 * m[name] + (1 - config.beta1) * gradients[name]
            v[name] = config.beta2 * v[name] + (1 - config.beta2) * gradients[name] ** 2
            t = step + 1
            mean = m[name] / (1 - config.beta1**t) if corrected else m[name]
            square = v[name] / (1 - config.beta2**t) if corrected else v[name]
            update = mean / (np.sqrt(square) + config.epsilon) + decayed * config.weight_decay * params[name]
            pairs = zip(logical_tensors(name, params[name]), logical_tensors(name, update), strict=True)
            for weights, change in pairs:
                ratio = 1.0
                if lamb and (decayed or config.lamb_flavour == "paper"):
                    sizes = np.linalg.norm(weights), np.linalg.norm(change)
                    ratio = sizes[0] / sizes[1] if min(sizes) > 0 else 1.0
                weights -= lr(step) * ratio * change
    return params


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(("name", "flavour"), [("adamw", "nvidia"), *(("lamb", flavour) for flavour in FLAVOURS)])
def test_twenty_updates_against_numpy(name, flavour, clip):
    config = OptimizerConfig(name=name, lamb_flavour=flavour, weight_decay=0.1, clip_norm=clip)
    rng = np.random.default_rng(0)
    start = {n: rng.normal(0, 0.5, shape).astype(np.float32) for n, shape in NAMES.items()}
    # Layers of very different size: one ratio for the whole stack would show. A bias of zero: its ratio is 1.
    for n in start:
        if "layers" in n:
            start[n][1] *= 30
    start["mlm/bias"][:] = 0
    start["encoder/layers/qkv/kernel"][:, :, 2] *= 10

    def gradients_of(step):
        noise = np.random.default_rng([1, step])
        return {n: (0.3 * noise.normal(size=shape)).astype(np.float32) for n, shape in NAMES.items()}

    params = jax.tree.map(jnp.asarray, nest(start))
    optimizer = make_optimizer(config, SCHEDULE, params)

    @jax.jit
    def update(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    state = optimizer.init(params)
    for step in range(STEPS):
        params, state = update(params, state, nest(gradients_of(step)))

    def lr(step):
        return 0.01 * step / 5 if step < 5 else 0.01 * (1 - step / STEPS)

    expected = numpy_optimizer(config, {n: a.copy() for n, a in start.items()}, gradients_of, lr)
    for n, ours in name_leaves(params).items():
        moved = np.abs(expected[n] - start[n]).max()
        assert moved > 1e-3, n
        np.testing.assert_allclose(ours, expected[n], rtol=1e-5, atol=1e-5 * moved, err_msg=n)


def test_flavours_differ():
    assert {name: tuple(flavour) for name, flavour in FLAVOURS.items()} == {
        "paper": (True, True),
        "google": (False, False),
        "nvidia": (True, False),
    }


@pytest.mark.parametrize("name", sorted(presets.preset_files()))
def test_every_parameter_has_a_treatment(name):
    config = presets.load_config(name)
    shapes = jax.eval_shape(lambda: pretraining.init(config.model, jax.random.key(0), pair=True))
    leaves = name_leaves(shapes)
    for path, treatment in name_leaves(treatments(shapes)).items():
        assert treatment.decayed == path.endswith(("/kernel", "/word", "/position", "/token_type")), path
        counted = [leaves[path].shape[axis] for axis in treatment.tensor_axes]
        layers = [config.model.num_layers] if "/layers/" in path else []
        assert counted == layers + [3] * ("/qkv/" in path), path


def test_a_new_parameter_must_be_thought_about():
    with pytest.raises(LookupError, match="no rule matches parameter 'encoder/adapter/gate': add it to the table"):
        treatments({"encoder": {"adapter": {"gate": jnp.zeros(3)}}})
    assert treatments({"x": {"bias": 0}})["x"]["bias"] == Treatment(decayed=False)


def test_learning_rate_of_one_phase():
    phase = Phase(steps=100, learning_rate=2.0, warmup_steps=10, end_learning_rate=0.5)
    schedule = jax.jit(learning_rate((phase,)))
    expected = {0: 0.0, 1: 0.2, 9: 1.8, 10: 0.5 + 1.5 * 0.9, 50: 1.25, 99: 0.515, 100: 0.5, 1000: 0.5}
    for step, rate in expected.items():
        np.testing.assert_allclose(schedule(step), rate, rtol=1e-6, err_msg=str(step))
    assert schedule(3).dtype == jnp.float32


def test_learning_rate_decays_by_its_power():
    schedule = jax.jit(learning_rate((Phase(steps=10, learning_rate=1.0, warmup_steps=0, decay_power=2.0),)))
    np.testing.assert_allclose([schedule(step) for step in (0, 5, 9)], [1.0, 0.25, 0.01], rtol=1e-6)


def test_a_phase_starts_its_own_schedule():
    phases = (
        Phase(steps=10, learning_rate=1.0, warmup_steps=0, end_learning_rate=0.1),
        Phase(steps=20, learning_rate=0.1, warmup_steps=4),
    )
    schedule = jax.jit(learning_rate(phases))
    rates = [float(schedule(step)) for step in (9, 10, 11, 14, 20, 29, 30)]
    expected = [0.19, 0.0, 0.025, 0.1 * 0.8, 0.05, 0.1 / 20, 0.0]
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-7)


def test_long_runs_keep_their_precision():
    """A million updates: float32 progress is still exact to a millionth."""
    schedule = jax.jit(learning_rate((Phase(steps=1_000_000, learning_rate=1e-4, warmup_steps=10_000),)))
    for step in (1, 9_999, 10_000, 123_457, 999_999):
        exact = 1e-4 * (step / 10_000 if step < 10_000 else 1 - step / 1_000_000)
        np.testing.assert_allclose(float(schedule(jnp.int32(step))), exact, rtol=1e-5, atol=1e-11)


def test_published_schedule_meets_at_a_tenth():
    """bert_base: one linear decay over both phases."""
    schedule = jax.jit(learning_rate(presets.load_config("bert_base").phases))
    np.testing.assert_allclose(float(schedule(899_999)), float(schedule(900_000)), rtol=1e-3)
    np.testing.assert_allclose(float(schedule(500_000)), 1e-4 - 9e-5 * 5 / 9, rtol=1e-5)
