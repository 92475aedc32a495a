"""The presets: published sizes, golden files, what their docstrings state, and that each of them can be trained."""

import ast
import difflib
import functools
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from bert_jax import config as config_lib
from bert_jax.config import Config, DataConfig, Phase, presets
from bert_jax.model import bert
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.heads import Heads
from bert_jax.training.optimizers.param_rules import param_rules
from bert_jax.training.optimizers.schedules import learning_rate
from bert_jax.training.param_paths import name_leaves
from bert_jax.training.pretraining_task import Pretraining, model_spec
from bert_jax.training.sharding import state_shardings
from tests.objectives.masking_batches import VOCABULARY, make_batch

pytestmark = pytest.mark.usefixtures("quick_compilation")

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "configs"
PRESETS = list(presets.preset_files())
DRAWN = "bert_tiny"
"""The preset whose weights are drawn for its golden file."""

# (encoder, with its pooler if there is a pair objective; the same with heads).
COUNTS = {
    "albert_base": (11_683_584, 11_813_810),
    "babylm_100m": (111_693_312, 112_300_288),
    "babylm_10m": (27_928_320, 28_084_352),
    "bert_24h": (334_094_336, 335_176_506),
    "bert_base": (109_482_240, 110_106_428),
    "bert_large": (335_141_888, 336_226_108),
    "bert_large_76min": (335_141_888, 336_226_108),
    "bert_large_lamb": (335_141_888, 336_226_108),
    "bert_large_mlperf": (335_141_888, 336_226_108),
    "bert_medium": (41_373_184, 41_668_412),
    "bert_mini": (11_170_560, 11_267_900),
    "bert_small": (28_763_648, 29_058_876),
    "bert_tiny": (4_385_920, 4_433_468),
    "electra_small": (13_483_008, 14_196_219),
    "ettin_17m": (16_797_696, 16_913_856),
    "ettin_32m": (31_883_520, 32_081_728),
    "mobilebert": (24_844_544, 36_860_220),
    "modern_base": (149_015_040, 149_656_000),
    "modern_base_8k": (149_015_040, 149_656_000),
    "roberta_base": (124_055_040, 124_697_433),
    "words_10m": (33_212_928, 33_392_058),
    "words_10m_cpu": (7_220_160, 7_288_122),
}


def paired(config: Config) -> bool:
    return config.objective.pair != "none"


def shapes_of(config: Config) -> Any:
    return model_spec(config, -1).shapes()


def mesh(data: int, fsdp: int, tensor: int) -> AbstractMesh:
    return AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def test_the_presets_are_these():
    assert list(COUNTS) == PRESETS == sorted(path.stem for path in GOLDEN.glob("*.txt"))


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts(name):
    shapes = shapes_of(presets.load_config(name))
    counts = tuple(sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (shapes["encoder"], shapes))
    assert counts == COUNTS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_docstrings(name):
    """Paper or repository, command, what to expect and who says so, parameters."""
    text = ast.get_docstring(ast.parse(presets.preset_files()[name].read_text()))
    lines = text.splitlines()
    assert any(line.startswith(("Paper: ", "Recipe: ")) for line in lines)
    assert any(line.startswith("Command: ") and f"bert-jax pretrain {name} --corpus DIR" in line for line in lines)
    expected = text[text.index("\nExpected: ") :]
    assert name in ("bert_tiny", "words_10m_cpu") or "not run here" in expected
    for count in COUNTS[name]:
        assert f"{count:,}" in text[text.index("\nParameters: ") :]


def test_presets_for_accelerators_compute_in_bfloat16():
    kinds = {name: presets.load_config(name).model.compute_dtype for name in PRESETS}
    assert [name for name, kind in kinds.items() if kind == "float32"] == ["bert_mini", "bert_tiny", "words_10m_cpu"]


def test_learning_rates_of_mlperf():
    """mlcommons/training optimization.py with the README's numbers: warmup from step -76, then the decay under it."""
    (phase,) = presets.load_config("bert_large_mlperf").phases
    for step in range(600):
        share = (step + 76) / 287 if step + 76 < 287 else 1 - step / 600
        assert math.isclose(learning_rate(phase, step), 0.00288293 * share), step


def shrink(config: Config) -> Config:
    """The same plan and objective in a model of two small layers, for a step of four short rows, in float32.

    So presets that differ in nothing else are compiled once.
    """
    model = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "scan_unroll": 1}
    model |= {"vocab_size": VOCABULARY.size, "max_positions": 32, "initializer_range": 0.02, "compute_dtype": "float32"}
    if config.model.embedding_size is not None:
        model["embedding_size"] = 24
    data = DataConfig(format=config.data.format)
    small = config_lib.replace(Config(name="small", objective=config.objective, data=data, model=config.model))
    return config_lib.replace(small, model=model, phases=(Phase(steps=1, seq_len=32, batch_size=4),))


def draw(shapes: Any) -> Any:
    """Weights as `whole.init` would draw them, without the time to compile it."""
    rng = np.random.default_rng(0)

    def make(path: tuple, leaf: Any) -> np.ndarray:
        constant = {"bias": 0.0, "scale": 1.0}.get(path[-1].key)
        values = rng.normal(0, 0.02, leaf.shape) if constant is None else np.full(leaf.shape, constant)
        return values.astype(np.float32)

    return jax.tree_util.tree_map_with_path(make, shapes)


@functools.partial(jax.jit, static_argnums=0)
def losses_and_gradients(config: Config, params, batch):
    continues = bytes(token % 3 == 0 and token not in VOCABULARY.special_ids for token in range(VOCABULARY.size))
    task = Pretraining(config, VOCABULARY._replace(continues_word=continues))
    masked = task.prepare(batch, jax.numpy.uint32(config.seed))
    dropout_key = DropoutKey(jax.numpy.uint32(1), jax.numpy.arange(4))

    def loss(params):
        sums = task.sums(params, masked, dropout_key)
        means = {name: sums[name].sum / sums[name].weight for name in task.loss_weight_sums(masked)}
        return sum(means.values()), means

    return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_shrunken_preset_learns_from_a_batch(name):
    """Forward and backward with the preset's masks, losses and dropout; every array is reached."""
    preset = presets.load_config(name)
    config = shrink(preset)
    params = draw(shapes_of(config))
    full, small = name_leaves(shapes_of(preset)), name_leaves(params)
    assert {path: leaf.ndim for path, leaf in full.items()} == {path: leaf.ndim for path, leaf in small.items()}
    batch = make_batch([[(1, 32)], [(2, 27)], [(3, 14), (4, 18)], [(5, 20)]], 32)
    (_, losses), gradients = losses_and_gradients(config, params, batch)
    expected = {"mlm_loss": math.log(VOCABULARY.size)} | ({"pair_loss": math.log(2)} if paired(config) else {})
    if config.objective.token == "rtd":
        expected = {"generator_loss": math.log(VOCABULARY.size), "rtd_loss": math.log(2)}
    if config.objective.z_loss:
        expected["mlm_z_loss"] = math.log(VOCABULARY.size) ** 2
    assert losses.keys() == expected.keys()
    for loss, value in expected.items():
        steepness = 2 * math.log(VOCABULARY.size) if loss == "mlm_z_loss" else 1
        assert abs(losses[loss] - value) < 0.3 * steepness, loss
    for path, gradient in name_leaves(gradients).items():
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0, path


def describe(name: str) -> str:
    """Config and parameters of a preset as lines that a diff can be read of."""
    config = presets.load_config(name)
    lines = [f"{path} = {value!r}" for path, value in config_lib.flatten(config_lib.to_dict(config)).items()]
    shapes = shapes_of(config)
    specs = name_leaves(jax.tree.map(lambda sharding: sharding.spec, state_shardings(mesh(1, 2, 2), shapes)))
    treated = name_leaves(param_rules(shapes))
    leaves = name_leaves(shapes)
    if name == DRAWN:
        drawn = jax.jit(lambda: bert.init(config.model, jax.random.key(config.seed), Heads(pair=True)))()
        leaves = name_leaves(jax.tree.map(np.asarray, drawn))
    lines += ["", "parameter | type and shape | first mean, deviation | decayed | tensor axes | split on mesh 1x2x2"]
    for path, leaf in leaves.items():
        first = "not drawn"
        if name == DRAWN:
            # + 0.0: no "-0.000"
            first = f"{round(float(leaf.mean(dtype=np.float64)), 3) + 0.0:.3f}, {leaf.std(dtype=np.float64):.3f}"
        treatment = treated[path]
        about = (
            f"{leaf.dtype}{list(leaf.shape)}",
            first,
            "decayed" if treatment.decayed else "undecayed",
            f"{treatment.tensor_axes}",
            f"{tuple(specs[path])}",
        )
        lines.append(" | ".join((path, *about)))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", PRESETS)
def test_golden_config(name):
    """A changed default, initialisation, decay or sharding shows as a diff; UPDATE_GOLDEN=1 accepts it."""
    path, text = GOLDEN / f"{name}.txt", describe(name)
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    golden = path.read_text()
    difference = "\n".join(difflib.unified_diff(golden.splitlines(), text.splitlines(), "golden", "now", n=0))
    assert not difference, f"{path.name} differs; UPDATE_GOLDEN=1 accepts this:\n{difference}"
