"""Each term of the roofline and the bytes sent, against sums computed by hand; bottlenecks; limits of the model."""

import dataclasses

import pytest

from bert_jax.chips import CHIPS, Sizes, slices_for
from bert_jax.config.presets import load_config
from bert_jax.errors import UserError
from bert_jax.objectives.masking import Vocabulary
from bert_jax.planning import roofline
from bert_jax.planning.roofline import axis_bandwidth, elementwise_work, expected_bytes_sent, link_seconds, predict
from bert_jax.planning.workload import workload
from bert_jax.training.pretraining_task import Pretraining
from tests.planning.machines import CHIP, chip_with, run

EMBEDDINGS = 96 * 8 + 64 * 8 + 2 * 8 + 16
LAYER = (8 * 24 + 24) + (8 * 8 + 8) + (8 * 16 + 16) + (16 * 8 + 8) + 32
HEAD = 8 * 8 + 8 + 16 + 96
TOTAL = EMBEDDINGS + 2 * LAYER + HEAD
# Norms and biases are on every device; all else is split over fsdp.
COPIED = 16 + 2 * (24 + 8 + 16 + 8 + 32) + (8 + 16 + 96)
SPLIT = TOTAL - COPIED
TOKENS, SCORES, LOGITS = 8 * 16, 8 * 2 * 16 * 16, 8 * 2 * 96
LINEAR, ATTENTION = 2 * 8 * (4 * 8 + 2 * 16), 4 * 8 * 16
HEAD_FLOPS = 8 * 2 * 2 * 8 * (8 + 96)
"""Forward FLOPs per token and layer, and of the head: 2 predictions in each of 8 rows."""


def sent(sizes, accumulation=1, **settings):
    return expected_bytes_sent(workload(run(**settings), 0, sizes, accumulation))


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("dots", ATTENTION), ("full", LINEAR + ATTENTION)])
def test_matmul(remat, again):
    expected = TOKENS * 2 * (3 * (LINEAR + ATTENTION) + again) + 3 * HEAD_FLOPS
    for accumulation in (1, 4):
        prediction = predict(run(remat=remat), 0, Sizes(), accumulation, CHIP)
        assert prediction.seconds["matmul"] == pytest.approx(expected / (1e12 * 0.5))
        assert prediction.flops == TOKENS * 2 * 3 * (LINEAR + ATTENTION) + 3 * HEAD_FLOPS, "without recomputation"
    # Float32 products are slower on this chip, and its arrays twice as large.
    float32 = predict(run(remat=remat, compute_dtype="float32"), 0, Sizes(), 1, CHIP).seconds
    assert float32["matmul"] == pytest.approx(2 * prediction.seconds["matmul"])
    assert float32["hidden"] == pytest.approx(2 * prediction.seconds["hidden"])


def test_flops_are_those_of_the_task():
    config = load_config("bert_large_lamb")
    for phase, step in ((0, 0), (1, 7038)):
        flops = predict(config, phase, Sizes(256), 32, CHIPS["v5e"]).flops
        assert flops == Pretraining(config, Vocabulary(config.model.vocab_size, 103, ())).step_flops(step)


def test_elementwise_traffic():
    seconds = predict(run(), 0, Sizes(), 1, CHIP).seconds
    assert seconds["hidden"] == pytest.approx(2 * TOKENS * 8 * roofline.HIDDEN_ACCESSES * 2 / 1e10)
    assert seconds["scores"] == pytest.approx(2 * SCORES * roofline.SCORE_ACCESSES * 2 / 1e10)
    assert seconds["logits"] == pytest.approx(LOGITS * roofline.LOGIT_BYTES / 1e10)
    assert predict(run(attention="cudnn", attention_dropout=0.0), 0, Sizes(), 1, CHIP).seconds["scores"] == 0


@pytest.mark.parametrize(
    ("model", "hashes"), [({"hidden_dropout": 0.0, "attention_dropout": 0.0}, 0), ({}, 1), ({"remat": "full"}, 2)]
)
def test_operations_where_vector_operations_are_slow(model, hashes):
    """`remat` full computes the hash of dropout again."""
    seconds = predict(run(**model), 0, Sizes(), 1, chip_with(vector_ops=1e6)).seconds
    hash_ops, elements = hashes * roofline.HASH_OPS, 2 * TOKENS * 8
    assert seconds["scores"] == pytest.approx(2 * SCORES * (roofline.SOFTMAX_OPS + hash_ops) / 1e6)
    assert seconds["logits"] == pytest.approx(LOGITS * roofline.SOFTMAX_OPS / 1e6)
    activations = 2 * TOKENS * 16 * roofline.ACTIVATION_OPS["gelu"]
    assert seconds["hidden"] == pytest.approx((elements * 2 * (roofline.NORM_OPS + hash_ops) + activations) / 1e6)


@pytest.mark.parametrize(("optimizer", "update"), [("adamw", 28), ("lamb", 40)])
def test_parameter_traffic(optimizer, update):
    def moved(sizes, accumulation):
        return elementwise_work(workload(run(), 0, sizes, accumulation), optimizer)["parameters"][0]

    assert moved(Sizes(), 1) == (12 + update) * TOTAL
    assert moved(Sizes(), 2) == (2 * 24 + update) * TOTAL
    assert moved(Sizes(fsdp=4), 1) == 12 * TOTAL + update * (SPLIT // 4 + COPIED)


def test_step_is_the_sum_and_mfu_follows():
    prediction = predict(run(), 0, Sizes(data=2), 1, CHIP)
    assert prediction.step_seconds == pytest.approx(sum(prediction.seconds.values()))
    assert prediction.mfu == pytest.approx(prediction.flops / prediction.step_seconds / 2e12)
    # Bytes that a compiled program sends replace the expected ones.
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


@pytest.mark.parametrize("name", CHIPS)
def test_more_chips_are_never_more_than_proportionally_faster(name):
    config, chip = load_config("bert_large_lamb"), CHIPS[name]

    def predicted(count):
        phase = dataclasses.replace(config.phases[1], batch_size=16 * count, accumulation=1)
        scaled = dataclasses.replace(config, phases=(config.phases[0], phase))
        return predict(scaled, 1, Sizes(count, slices=slices_for(chip, count)), 4, chip)

    for count in (2, 8, 64, 256, 2048):
        assert predicted(count).step_seconds > predicted(1).step_seconds
        assert 0 < predicted(count).mfu < chip.efficiency.matmul


def test_parameters_of_a_device():
    assert workload(run(), 0, Sizes(), 1).parameters == (TOTAL, TOTAL, TOTAL, 0)
    assert workload(run(), 0, Sizes(fsdp=4), 1).parameters == (TOTAL, SPLIT // 4 + COPIED, TOTAL, SPLIT)


def test_bytes_sent():
    """A reduction of 4 bytes per parameter once per step, for any accumulation; between slices only a device's part."""
    nothing = {"data": 0, "fsdp": 0, "tensor": 0, "network": 0}
    assert sent(Sizes()) == nothing
    for accumulation in (1, 2):
        assert sent(Sizes(data=4), accumulation) == nothing | {"data": pytest.approx(2 * 3 / 4 * 4 * TOTAL)}
    gathered = 3 / 4 * 4 * (2 * SPLIT + 2 * COPIED)
    reduced = 2 * 1 / 2 * 4 * (SPLIT / 4 + COPIED)
    assert sent(Sizes(data=2, fsdp=4)) == pytest.approx(nothing | {"fsdp": gathered, "data": reduced})
    between = {"data": 2 * 3 / 4 * 4 * TOTAL, "network": 2 * 1 / 2 * 4 * TOTAL / 4}
    assert sent(Sizes(data=8, slices=2)) == pytest.approx(nothing | between)


@pytest.mark.parametrize(("remat", "times"), [("none", 4), ("dots", 4), ("full", 6)])
def test_tensor_reduces_activations_in_every_layer_and_micro_batch(remat, times):
    layers = times * 2 * (4 * 16) * 8 * 2
    # 97 words cannot be split, so the table needs no all-reduce.
    assert sent(Sizes(tensor=2), 2, remat=remat, vocab_size=97)["tensor"] == pytest.approx(2 * 1 / 2 * layers * 2)
    table = 4 * 8 * (4 * 16 + 4 * 2)
    assert sent(Sizes(tensor=2), 2, remat=remat)["tensor"] == pytest.approx(2 * 1 / 2 * (layers + table) * 2)


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


def test_causal_rows_predict_everywhere_but_at_their_end():
    assert workload(run(direction="causal"), 0, Sizes(), 1).predictions == 15


def test_the_model_has_the_depth_of_the_phase():
    config = run()
    phases = (dataclasses.replace(config.phases[0], num_layers=1), *config.phases)
    stacked = dataclasses.replace(config, phases=phases)
    assert [workload(stacked, i, Sizes(), 1).model.num_layers for i in (0, 1)] == [1, 2]
