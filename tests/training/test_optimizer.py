"""Optimizers against numpy, skipped steps, frozen and scaled parameters, and the table of rules."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import OptimizerConfig, presets
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.training.optimizers import describe
from bert_jax.training.optimizers.lamb import FLAVOURS
from bert_jax.training.optimizers.norms import sum_per_tensor
from bert_jax.training.optimizers.optimizer import Optimizer
from bert_jax.training.optimizers.param_rules import ParamRule, param_rules
from bert_jax.training.param_paths import name_leaves
from tests.training import optimizer_oracle as oracle

LAMB = {"name": "lamb", "weight_decay": 0.1}
CASES = {
    "adamw": {"weight_decay": 0.1},
    "adamw, unclipped": {"weight_decay": 0.1, "clip_norm": None},
    "adamw, uncorrected": {"weight_decay": 0.1, "bias_correction": False},
    **{f"lamb, {flavour}": LAMB | {"lamb_flavour": flavour} for flavour in FLAVOURS},
    "lamb, nvidia, unclipped": LAMB | {"lamb_flavour": "nvidia", "clip_norm": None},
    "lamb, uncorrected": LAMB | {"bias_correction": False},
    "lamb, google, corrected": LAMB | {"lamb_flavour": "google", "bias_correction": True},
    "lamb, bounds": LAMB | {"min_trust_ratio": 1.5, "max_trust_ratio": 4.0},
    "stable_adamw": {"name": "stable_adamw", "weight_decay": 0.1},
    "stable_adamw, uncorrected": {"name": "stable_adamw", "weight_decay": 0.1, "bias_correction": False},
    "muon": {"name": "muon", "weight_decay": 0.1},
    "muon, less momentum": {"name": "muon", "weight_decay": 0.1, "muon_momentum": 0.8},
}
FROZEN = ("encoder/embeddings/word", "encoder/layers/down/kernel")


class Run:
    """Updates of the small model, one after the other, as training makes them."""

    def __init__(self, config, frozen=(), layers=True):
        self.params = jax.tree.map(jnp.asarray, oracle.nest(oracle.start()))
        optimizer = Optimizer(config, self.params, frozen, layers=layers)
        self.state = optimizer.init(self.params)
        self.program = jax.jit(optimizer.update)

    def update(self, gradients, rate, loss_is_finite=True):
        rate, finite = jnp.float32(rate), jnp.bool_(loss_is_finite)
        self.params, self.state, metrics = self.program(oracle.nest(gradients), self.state, self.params, rate, finite)
        return {name: float(value) for name, value in metrics.items()}

    def all_updates(self, gradients_of=oracle.gradients_of):
        return [self.update(gradients_of(step), oracle.learning_rate_of(step)) for step in range(oracle.STEPS)]

    def bits(self):
        """Everything, as bytes: 0 and -0 differ, and a NaN is itself."""
        return {name: np.asarray(leaf).tobytes() for name, leaf in name_leaves((self.params, self.state)).items()}


def assert_agrees(run, records, expected, expected_records):
    """Values of every logical tensor, and how far it moved; every metric of every step."""
    found = {name: np.asarray(leaf, np.float64) for name, leaf in name_leaves(run.params).items()}
    before = oracle.start()
    assert max(oracle.distances(found, expected).values()) < 1e-5
    moves = [{name: array - before[name] for name, array in p.items()} for p in (found, expected)]
    moves = [{name: array for name, array in move.items() if moves[1][name].any()} for move in moves]
    assert max(oracle.distances(*moves).values()) < 1e-4
    for step, (ours, theirs) in enumerate(zip(records, expected_records, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-9, err_msg=f"{name}, step {step}")


@pytest.mark.parametrize("case", CASES)
def test_fifty_updates_against_numpy(case):
    config = OptimizerConfig(**CASES[case])
    run = Run(config)
    records = run.all_updates()
    assert_agrees(run, records, *oracle.train(config, oracle.start()))
    assert int(run.state.count) == oracle.STEPS


def test_every_name_is_an_optimizer():
    """Another name is refused with the known ones, instead of training with some default."""
    names = typing.get_args(typing.get_type_hints(OptimizerConfig)["name"])
    assert set(names) == {case.split(",")[0] for case in CASES}
    assert all(describe(name).cost.moments for name in names)
    with pytest.raises(UserError, match=r"optimizer\.name is 'sgd': it must be one of adamw, lamb"):
        OptimizerConfig(name="sgd")


def test_cases_differ():
    """Clipping, correction, flavours and bounds all show, else the test above would not notice them."""
    ends = {case: oracle.train(OptimizerConfig(**kind), oracle.start())[0] for case, kind in CASES.items()}
    names = sorted(ends)
    # Google's with correction is NVIDIA's, and NVIDIA's without is Google's: that is all in which they differ.
    same = {frozenset(("lamb, google, corrected", "lamb, nvidia")), frozenset(("lamb, google", "lamb, uncorrected"))}
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            apart = max(oracle.distances(ends[a], ends[b]).values())
            assert (apart == 0) if frozenset((a, b)) in same else (apart > 1e-3), (a, b, apart)


def test_groups_are_left_out_on_request():
    config = OptimizerConfig(**CASES["lamb, nvidia"])
    few, many = (Run(config, layers=layers).update(oracle.gradients_of(0), 0.01) for layers in (False, True))
    overall = {"skipped", "gradient_norm", "update_norm", "parameter_norm", "trust_ratio_min", "trust_ratio_max"}
    assert few.keys() == overall
    assert {name: value for name, value in many.items() if "/" not in name} == pytest.approx(few, rel=1e-6)
    groups = {name.split("/")[1] for name in many.keys() - overall}
    assert groups == {"embeddings", "layer_00", "layer_01", "heads"}


def spoiled(value):
    gradients = oracle.gradients_of(3)
    gradients["encoder/layers/down/kernel"][1, 2, 3] = value
    return gradients


SLOW_KINDS = ("lamb, google", "muon", "stable_adamw")


@pytest.mark.parametrize(
    "kind", ["adamw, unclipped", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)]
)
def test_what_is_not_finite_changes_nothing(kind):
    """3e38 is finite, but its square is not: the norm says nothing about such a gradient."""
    run = Run(OptimizerConfig(**CASES[kind]))
    for step in range(3):
        run.update(oracle.gradients_of(step), 0.01)
    before = run.bits()
    for value, loss_is_finite in ((0.1, False), (np.nan, True), (np.inf, True), (-np.inf, True), (3e38, True)):
        metrics = run.update(spoiled(value), 0.01, loss_is_finite)
        assert run.bits() == before, value
        assert metrics["skipped"] == 1 and metrics["update_norm"] == 0
        assert np.isfinite(metrics["gradient_norm"]) == (not loss_is_finite)
        assert all(np.isfinite(v) for name, v in metrics.items() if not name.startswith("gradient_norm"))
        assert np.isfinite(metrics["gradient_norm/layer_00"]), "only the group with the bad gradient has a bad norm"
    assert run.update(oracle.gradients_of(4), 0.01)["skipped"] == 0 and int(run.state.count) == 4
    assert run.bits() != before


@pytest.mark.parametrize("kind", ["adamw", "lamb, nvidia"])
def test_frozen_parameters_stay(kind):
    config = OptimizerConfig(**CASES[kind])
    run = Run(config, FROZEN)
    # Moments of an earlier phase stay too.
    mu = run.state.mu
    mu["encoder"]["embeddings"]["word"] = mu["encoder"]["embeddings"]["word"] + 0.5
    before = run.bits()

    def huge(step):
        """Neither the norm nor the guard may look at gradients of frozen parameters."""
        gradients = oracle.gradients_of(step)
        gradients["encoder/embeddings/word"][0] = np.nan
        gradients["encoder/layers/down/kernel"] *= 100
        return gradients

    records = run.all_updates(huge)
    after = run.bits()
    still = {name for name in before if before[name] == after[name]}
    assert still == {name for name in before if name.endswith(FROZEN)} and len(still) == 6
    assert_agrees(run, records, *oracle.train(config, oracle.start(), frozen=FROZEN))


def test_learning_rates_are_scaled():
    """The first pattern that matches counts; factor 0 leaves moments alone, unlike freezing."""
    scales = (("word", 0.0), ("qkv/.*", 0.25), ("encoder/.*", 2.0))
    config = OptimizerConfig(**CASES["lamb, paper"], learning_rate_scales=scales)
    factors = {n: 2.0 if n.startswith("encoder") else 1.0 for n in oracle.SHAPES}
    factors |= {n: 0.25 for n in oracle.SHAPES if "qkv" in n} | {"encoder/embeddings/word": 0.0}
    run = Run(config)
    records = run.all_updates()
    assert_agrees(run, records, *oracle.train(config, oracle.start(), scales=factors))
    assert np.any(run.state.mu["encoder"]["embeddings"]["word"])


def test_layer_decay():
    """Layers 2 and 1 of 2, then the embeddings; heads have the full rate; scales by pattern count too."""
    config = OptimizerConfig(**CASES["adamw"], layer_decay=0.5, learning_rate_scales=(("qkv/.*", 0.25),))
    run = Run(config)
    records = run.all_updates()
    groups = {"layer_01": 0.5, "layer_00": 0.25, "embeddings": 0.125}
    scales = {name: 0.25 for name in oracle.SHAPES if "qkv" in name}
    assert_agrees(run, records, *oracle.train(config, oracle.start(), scales=scales, group_scales=groups))


DECAYED = ("/kernel", "/word", "/position", "/token_type", "/extra_columns")


@pytest.mark.parametrize("name", sorted(presets.preset_files()))
def test_every_parameter_has_a_treatment(name):
    config = presets.load_config(name)
    shapes = bert.shapes(config.model, Heads(pair=True))
    leaves = name_leaves(shapes)
    for path, treatment in name_leaves(param_rules(shapes)).items():
        assert treatment.decayed == path.endswith(DECAYED), path
        assert treatment.learning_rate_scale == 1 and not treatment.frozen
        counted = [leaves[path].shape[axis] for axis in treatment.tensor_axes]
        layers = [config.model.parameter_groups or config.model.num_layers] if "/layers/" in path else []
        is_matrix = "/layers/" in path and path.endswith("kernel")
        assert treatment.input_axes == (() if not is_matrix else (1, 2) if "/attention_out/" in path else (1,)), path
        assert counted == layers + [3] * ("/qkv/" in path) + [2] * ("/query_key/" in path), path


def test_a_new_parameter_must_be_thought_about():
    with pytest.raises(LookupError, match="no rule matches parameter 'encoder/adapter/gate': add it to the table"):
        param_rules({"encoder": {"adapter": {"gate": jnp.zeros(3)}}})
    assert param_rules({"x": {"bias": 0}})["x"]["bias"] == ParamRule(decayed=False)


@pytest.mark.parametrize(
    ("scales", "frozen", "words"),
    [
        ((("encoder/layrs/.*", 0.5),), (), ["optimizer.learning_rate_scales: 'encoder/layrs/.*'", "encoder/layers/"]),
        ((), ("wrod",), ["phases: frozen: 'wrod'", "similar are word"]),
        ((), ("ias",), ["phases: frozen: 'ias'", "bias"]),
        ((), ("layers/(",), ["phases: frozen: 'layers/(' is not a regular expression"]),
        ((("a)(b", 2.0),), (), ["optimizer.learning_rate_scales: 'a)(b' is not a regular expression"]),
        ((), ("encoder/.*", "mlm/.*"), ["phases: frozen", "leaves no parameter to train"]),
    ],
)
def test_patterns_that_mean_nothing(scales, frozen, words):
    with pytest.raises(UserError) as error:
        Optimizer(OptimizerConfig(learning_rate_scales=scales), oracle.nest(oracle.start()), frozen)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("shape", "tensor_axes"),
    [
        ((2, 8, 3, 4, 64), (0, 2)),
        ((2, 3, 4, 8), (0, 1)),
        ((2, 32, 96), (0,)),
        ((2, 80), (0,)),
        ((7, 70), ()),
        ((9,), ()),
    ],
)
def test_sums_per_tensor(shape, tensor_axes):
    """Over rows first, or all at once: the same sum, with axes of size 1."""
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    axes = tuple(axis for axis in range(len(shape)) if axis not in tensor_axes)
    expected = array.astype(np.float64).sum(axes, keepdims=True)
    found = jax.jit(lambda x: sum_per_tensor(x, tensor_axes))(array)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_of_a_generator_are_its_own(name):
    """Although its paths end as those of the discriminator, which is frozen."""
    task = {"task": {"output": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}}
    params = task | {"generator": task}
    optimizer = Optimizer(OptimizerConfig(name=name), params, ("^task/.*",))
    state = optimizer.init(params)
    new, new_state, _ = optimizer.update(params, state, params, jnp.float32(0.1), jnp.asarray(True))
    for tree, before in ((new, params), (new_state.mu, state.mu)):
        for path, leaf in name_leaves(tree).items():
            assert bool((leaf == name_leaves(before)[path]).all()) == path.startswith("task/"), path


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "stable_adamw"])
def test_a_first_step_that_is_skipped(name):
    """The count stays 0, for which the bias corrections would divide by 0."""
    params = {"task": {"output": {"kernel": jnp.ones((3, 4))}}}
    optimizer = Optimizer(OptimizerConfig(name=name), params)
    state = optimizer.init(params)
    new, new_state, _ = optimizer.update(params, state, params, jnp.float32(0.1), jnp.asarray(False))
    for found, expected in zip(jax.tree.leaves((new, new_state)), jax.tree.leaves((params, state)), strict=True):
        np.testing.assert_array_equal(found, expected)
