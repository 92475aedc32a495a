"""Memory model and roofline: pinned figures, sums by hand, compiled programs, and what must hold for any chip."""

import dataclasses
import difflib
import json
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bert_jax import config as config_lib
from bert_jax.chips import CHIPS, Sizes
from bert_jax.config import Config, OptimizerConfig, Phase
from bert_jax.config.presets import load_config
from bert_jax.errors import UserError
from bert_jax.model import families, layers, tpu_attention
from bert_jax.model.dropout import DropoutKey, dropout
from bert_jax.model.flops import pretraining_flops
from bert_jax.model.norms import LayerNorm
from bert_jax.objectives.masking import Vocabulary
from bert_jax.planning import roofline
from bert_jax.planning.memory_model import LAYER_WORKING_SHARE, LOGIT_BYTES, estimate_memory
from bert_jax.planning.roofline import axis_bandwidth, expected_bytes_sent, link_seconds, predict
from bert_jax.planning.workload import workload
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import make_mesh
from tests.jaxprs import operations
from tests.planning.machines import CHIP, chip_with, run

GOLDEN = Path(__file__).parents[1] / "golden" / "estimates.txt"
TOLERANCE = 0.15
"""Largest relative error of the total estimate against a compiled program (figures in docs/log/pods.md, 2026-11-21)."""
ONE, DRY = Sizes(), {"hidden_dropout": 0.0, "attention_dropout": 0.0}
CASES = {
    "bfloat16": (ONE, 1, {}),
    "float32": (ONE, 1, {"compute_dtype": "float32"}),
    "remat dots": (ONE, 1, {"remat": "dots"}),
    "remat full": (ONE, 1, {"remat": "full"}),
    "no dropout": (ONE, 1, DRY),
    "fused attention": (ONE, 1, DRY | {"attention": "cudnn"}),
    "gated relu": (ONE, 1, {"feed_forward": "gated", "activation": "relu"}),
    "factorised embeddings, shared layers": (ONE, 1, {"embedding_size": 4, "parameter_groups": 1}),
    "causal": (ONE, 1, {"direction": "causal"}),
    "lamb, micro-batches": (ONE, 4, {"optimizer": "lamb"}),
    "fsdp": (Sizes(fsdp=4), 1, {}),
    "fsdp, data": (Sizes(data=2, fsdp=4), 1, {}),
    "slices": (Sizes(data=8, slices=2), 1, {}),
    "tensor, micro-batches": (Sizes(tensor=2), 2, {}),
    "tensor, remat full": (Sizes(tensor=2), 1, {"remat": "full"}),
    "tensor does not divide the table": (Sizes(tensor=2), 1, {"vocab_size": 97}),
}


def test_figures():
    """A changed term of the models shows as a diff; UPDATE_GOLDEN=1 accepts it."""
    lines = []
    for name, (sizes, accumulation, settings) in CASES.items():
        case = run(**settings), 0, sizes, accumulation
        prediction, slow = predict(*case, CHIP), predict(*case, chip_with(vector_ops=1e6))
        figures = {"memory": estimate_memory(*case), "seconds": prediction.seconds, "sent": prediction.sent}
        figures |= {"seconds with slow vector units": slow.seconds}
        figures |= {"step": {"flops": prediction.flops, "mfu": prediction.mfu, "seconds": prediction.step_seconds}}
        for part, values in figures.items():
            lines.append(f"{name}: {part}: {json.dumps({kind: float(f'{x:.10g}') for kind, x in values.items()})}\n")
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text("".join(lines))
    difference = "".join(difflib.unified_diff(GOLDEN.read_text().splitlines(keepends=True), lines, n=0))
    assert not difference, f"{GOLDEN.name} differs; UPDATE_GOLDEN=1 accepts this:\n{difference}"


EMBEDDINGS = 96 * 8 + 64 * 8 + 2 * 8 + 16
LAYER_PARAMETERS = (8 * 24 + 24) + (8 * 8 + 8) + (8 * 16 + 16) + (16 * 8 + 8) + 32
MATRICES = 8 * 24 + 8 * 8 + 2 * 8 * 16
HEAD = 8 * 8 + 8 + 16 + 96
TOTAL = EMBEDDINGS + 2 * LAYER_PARAMETERS + HEAD
# Norms and biases are on every device; all else is split over fsdp.
COPIED = 16 + 2 * (24 + 8 + 16 + 8 + 32) + (8 + 16 + 96)
SPLIT = TOTAL - COPIED
TOKENS, SCORES = 8 * 16, 8 * 2 * 16 * 16
LAYER = 2 * (2 * TOKENS * 8 + 4 * TOKENS * 8 + 2 * TOKENS * 16) + 4 * TOKENS * 8 + 2 * TOKENS * 8 + SCORES * 7


def test_memory_by_hand():
    assert estimate_memory(run(), 0, ONE, 1) == {
        "parameters": 4 * TOTAL,
        "moments": 8 * TOTAL,
        "gradients": 4 * (TOTAL + 96 * 8),
        "gathered": 0,
        "casts": 2 * (TOTAL + 2 * (4 * 64 + 2 * 128)),
        "activations": LAYER + LAYER * 2 // 16 + 2 * 8 * 14 * (8 + 2 * 8),
        "temporaries": int(LAYER_WORKING_SHARE * LAYER) + LOGIT_BYTES * 8 * 2 * 96,
        "batch": 4 * 6 * TOKENS,
    }


def test_parameters_and_bytes_sent_by_hand():
    """A reduction of 4 bytes per parameter once per step, for any accumulation; between slices only a device's part."""

    def sent(sizes, accumulation=1, reduce_dtype="float32", **model):
        config = dataclasses.replace(run(**model), optimizer=OptimizerConfig(reduce_dtype=reduce_dtype))
        return expected_bytes_sent(workload(config, 0, sizes, accumulation))

    assert workload(run(), 0, ONE, 1).parameters == (TOTAL, TOTAL, 2 * MATRICES, TOTAL, 0, 0)
    gathered = 4 * SPLIT - 2 * 2 * MATRICES, 4 * SPLIT  # kernels of layers in bfloat16; all in float32
    by_fsdp = TOTAL, SPLIT // 4 + COPIED, 2 * MATRICES // 4, TOTAL, SPLIT, gathered[0]
    assert workload(run(), 0, Sizes(fsdp=4), 1).parameters == by_fsdp
    nothing = {"data": 0, "fsdp": 0, "tensor": 0, "network": 0}
    assert sent(ONE) == nothing
    for accumulation in (1, 2):
        assert sent(Sizes(data=4), accumulation) == nothing | {"data": pytest.approx(2 * 3 / 4 * 4 * TOTAL)}
    split = {"fsdp": 3 / 4 * (gathered[0] + 4 * SPLIT + 4 * 2 * COPIED), "data": 2 * 1 / 2 * 4 * (SPLIT / 4 + COPIED)}
    assert sent(Sizes(data=2, fsdp=4)) == pytest.approx(nothing | split)
    halves = {"fsdp": 3 / 4 * (gathered[0] + 2 * SPLIT + 2 * 2 * COPIED), "data": split["data"] / 2}
    assert sent(Sizes(data=2, fsdp=4), reduce_dtype="bfloat16") == pytest.approx(nothing | halves)
    whole = sent(Sizes(fsdp=4), compute_dtype="float32"), sent(Sizes(fsdp=4), dense_dtype="float8")
    assert all(one["fsdp"] == pytest.approx(3 / 4 * (gathered[1] + 4 * SPLIT + 8 * COPIED)) for one in whole)
    between = {"data": 2 * 3 / 4 * 4 * TOTAL, "network": 2 * 1 / 2 * 4 * TOTAL / 4}
    assert sent(Sizes(data=8, slices=2)) == pytest.approx(nothing | between)


def test_the_update_of_muon_by_hand():
    """Matrices of layers have one moment and five iterations, all other parameters are Adam's."""
    config = dataclasses.replace(run(), optimizer=OptimizerConfig(name="muon"))
    update = workload(config, 0, ONE, 1).update
    assert update.moments == 2 * TOTAL - 2 * MATRICES
    # Four matrices of 8 x 8, and two of 8 x 16, in each of two layers.
    assert update.flops == 2 * 5 * (4 * (4 * 8**3 + 2 * 8**3) + 2 * (4 * 8 * 8 * 16 + 2 * 8**3))
    assert estimate_memory(config, 0, ONE, 1)["moments"] == 4 * update.moments
    assert workload(run(), 0, ONE, 1).update == (2 * TOTAL, 28 * TOTAL, 0)


def count(function, shape, elements=None):
    """Operations per element, forward and backward, for an argument of this shape."""

    def both(x):
        y, gradient = jax.vjp(function, x)
        return y, gradient(y)

    return operations(both, jnp.ones(shape), elements=elements or math.prod(shape))


def test_elementwise_operations():
    """Those of the roofline are those of the code."""
    shape, key = (4, 32, 128), DropoutKey(jnp.uint32(1), jnp.arange(4))
    assert {name: count(function, shape) for name, function in layers.ACTIVATIONS.items()} == roofline.ACTIVATION_OPS
    norm = LayerNorm(128, 1e-12)
    assert count(lambda x: norm(x + 1.0), shape) == roofline.NORM_OPS
    dropped = operations(lambda x: dropout(x, 0.1, key), jnp.ones(shape), elements=4 * 32 * 128)
    assert dropped == roofline.HASH_OPS + roofline.MASK_OPS
    mask = jnp.ones(shape[1:], bool)
    assert count(lambda x: jax.nn.softmax(jnp.where(mask, x * 0.1, -1e9)), shape) == roofline.SOFTMAX_OPS


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_operations_of_kernels(rate):
    """Of the two heads of a step, whose block has 256 queries and 512 keys."""
    settings = {"num_heads": 2, "before": None, "after": None, "dropout_rate": rate, "interpret": True}
    segments, key = jnp.ones((1, 512), jnp.int32), DropoutKey(jnp.uint32(1), jnp.arange(1))

    def attention(x):
        return tpu_attention.kernel_attention(x, segments, dropout_key=key, **settings)

    forward, backward = (one + roofline.HASH_OPS * (rate > 0) for one in roofline.KERNEL_OPS)
    projected = jnp.ones((1, 512, 384))
    assert operations(attention, projected, elements=256 * 512) == 2 * forward
    assert count(attention, projected.shape, 256 * 512) == 2 * (forward + backward)


def test_flops():
    """Those of the task; without remat and packing, also those of the program, but for the last layer."""
    config = load_config("bert_large_lamb")
    for phase, step in ((0, 0), (1, 7038)):
        flops = predict(config, phase, Sizes(256), 32, CHIPS["v5e"]).flops
        assert flops == Pretraining(config, Vocabulary(config.model.vocab_size, 103, ())).step_flops(step)
    prediction = predict(run(), 0, ONE, 1, CHIP)
    # At 14 of 16 positions it has no query, context, output of attention and feed-forward.
    saved = 3 * 8 * 14 * (2 * 8 * (2 * 8 + 2 * 16) + 4 * 8 * 16)
    assert prediction.seconds["matmul"] == pytest.approx((prediction.flops - saved) / (1e12 * 0.5))
    # With 8-bit floats, products of dense layers take half of the time: all of one layer, 2 positions of the other.
    dense = 3 * 8 * ((16 + 2) * 2 * 8 * (4 * 8 + 2 * 16) + 14 * 2 * 8 * 2 * 8)
    in_float8 = predict(run(dense_dtype="float8"), 0, ONE, 1, CHIP)
    assert in_float8.seconds["matmul"] == pytest.approx(prediction.seconds["matmul"] - dense / 2 / (1e12 * 0.5))


def test_a_generator_is_counted():
    """Parameters, FLOPs, activations and logits; the discriminator computes its last layer everywhere."""
    plain = run()
    objective = {"token": "rtd", "random_token_share": 0.0, "generator_width": 0.5}
    config = config_lib.replace(plain, objective=objective)
    work, before = workload(config, 0, ONE, 1), workload(plain, 0, ONE, 1)
    assert (work.predictions, work.last_layer_share) == (0, 1.0)
    assert (work.generator.predictions, work.generator.last_layer_share) == (before.predictions, 2 / 16)
    assert (work.generator.model.hidden_size, work.generator.model.embedding_size) == (4, 8)
    task = Pretraining(config, Vocabulary(96, 4, ()))
    shapes = jax.eval_shape(task.init_params, jax.random.key(0))
    assert work.parameters.total == sum(leaf.size for leaf in jax.tree.leaves(shapes)) > TOTAL
    prediction = predict(config, 0, ONE, 1, CHIP)
    of_both = pretraining_flops(config.model, 8, 16, 0), pretraining_flops(work.generator.model, 8, 16, 2)
    assert prediction.flops == task.step_flops(0) == sum(of_both)
    # At 14 of 16 positions the generator's last layer has no query, context, output of attention and feed-forward.
    saved = 3 * 8 * 14 * (2 * 4 * (2 * 4 + 2 * 8) + 4 * 4 * 16)
    assert prediction.seconds["matmul"] == pytest.approx((prediction.flops - saved) / (1e12 * 0.5))
    memory, plain_memory = (estimate_memory(one, 0, ONE, 1) for one in (config, plain))
    assert memory.keys() == plain_memory.keys() and memory["batch"] == plain_memory["batch"]
    assert all(memory[kind] > plain_memory[kind] for kind in ("parameters", "moments", "activations", "temporaries"))


def test_bytes_of_a_compiled_program_replace_the_expected_ones():
    prediction = predict(run(), 0, Sizes(data=2), 1, CHIP)
    compiled = predict(run(), 0, Sizes(data=2), 1, CHIP, prediction.sent | {"data": 3 * prediction.sent["data"]})
    assert compiled.seconds == prediction.seconds | {"data": pytest.approx(3 * prediction.seconds["data"])}


@pytest.mark.parametrize(
    ("figures", "bound"),
    [
        ({"peak_flops": 1e8}, "compute"),
        ({"vector_ops": 1e6}, "compute"),
        ({"memory_bandwidth": 1e6}, "memory"),
        ({"link_bandwidth": 1e4}, "links"),
        ({"network_bandwidth": 1e3}, "links"),
    ],
)
def test_a_starved_chip_names_its_bound(figures, bound):
    assert predict(run(), 0, Sizes(data=8, slices=2), 1, chip_with(**figures)).bound == bound


@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_more_chips_are_never_more_than_proportionally_faster(name):
    config, chip = load_config("bert_large_lamb"), CHIPS[name]

    def predicted(count):
        phase = dataclasses.replace(config.phases[1], batch_size=16 * count, accumulation=1)
        scaled = dataclasses.replace(config, phases=(config.phases[0], phase))
        return predict(scaled, 1, Sizes(count, slices=-(-count // 256)), 4, chip)

    for count in (2, 8, 64, 256, 2048):
        assert predicted(count).step_seconds > predicted(1).step_seconds
        assert 0 < predicted(count).mfu < chip.efficiency.matmul


def test_links():
    """Two dimensions of 4: an axis along one uses two links, along both four; short ones are lines."""
    assert [axis_bandwidth(CHIP, length, 16) for length in (2, 4, 8, 16)] == [1e9, 2e9, 2e9, 4e9]
    assert [axis_bandwidth(CHIPS["v5e"], n, 256) for n in (16, 256)] == pytest.approx([100e9, 200e9])
    assert axis_bandwidth(chip_with(torus_dimensions=0), 8, 8) == 1e9, "a switch"
    sent = {"data": 4e9, "fsdp": 6e9, "tensor": 0, "network": 2e8}
    seconds = link_seconds(sent, Sizes(data=8, fsdp=4, slices=2), CHIP)
    assert seconds == {"data": 2.0, "fsdp": 3.0, "tensor": 0.0, "network": 2.0}


@pytest.mark.parametrize(
    ("sizes", "accumulation", "message"),
    [
        (Sizes(data=16), 1, "batch_size 8 is not divisible by 16 row shards"),
        (Sizes(data=2), 3, "accumulation 3"),
        (Sizes(tensor=4), 1, "mesh.tensor 4 does not divide model.num_heads 2"),
    ],
)
def test_indivisible_batches_and_meshes_are_refused(sizes, accumulation, message):
    with pytest.raises(UserError, match=message):
        workload(run(), 0, sizes, accumulation)


def test_the_model_has_the_depth_of_the_phase():
    config = run()
    stacked = dataclasses.replace(
        config, phases=(dataclasses.replace(config.phases[0], num_layers=1), config.phases[0])
    )
    assert [workload(stacked, i, ONE, 1).model.num_layers for i in (0, 1)] == [1, 2]


@pytest.mark.slow
def test_memory_with_remat_dots_is_near_a_compiled_program():
    """Of the step on one CPU device; donated inputs count once. Other policies: the next test."""
    model = dataclasses.replace(families.bert(3, 128, vocab_size=4096), remat="dots")
    config = Config(name="near", model=model, phases=(Phase(seq_len=128, batch_size=16, accumulation=1),))
    task = Pretraining(config, Vocabulary(config.model.vocab_size, 4, (0, 1, 2, 3, 4)), phase=0)
    usage = Programs(task, make_mesh(config.mesh, jax.devices()[:1])).train_step(0, 1).memory_analysis()
    estimated = sum(estimate_memory(config, 0, ONE, 1).values())
    # XLA for CPUs keeps less than all outputs that are named: the estimate is 17 % higher.
    assert estimated == pytest.approx(usage.argument_size_in_bytes + usage.temp_size_in_bytes, rel=0.2)


@pytest.mark.parametrize(
    ("remat", "accumulation", "temporary"), [("none", 128, 5_138_710_528), ("full", 8, 5_018_386_432)]
)
def test_memory_is_near_the_tpu_compilers_figure(remat, accumulation, temporary):
    """bert_large_lamb's second phase on v5e:16x16, compiled ahead of time with libtpu 0.0.51.

    The figures are in docs/log/pods.md, 2026-11-21.
    """
    config = load_config("bert_large_lamb")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))
    parts = estimate_memory(config, 1, Sizes(256), accumulation)
    assert parts["parameters"] + parts["moments"] == pytest.approx(4_036_766_208, rel=0.001)
    working = sum(parts.values()) - parts["parameters"] - parts["moments"] - parts["batch"]
    assert working == pytest.approx(temporary, rel=TOLERANCE)
