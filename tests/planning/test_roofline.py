"""Each term of the roofline and the bytes sent, against sums computed by hand; bottlenecks; limits of the model."""

import dataclasses

import pytest

from bert_jax.chips import CHIPS, Sizes, slices_for
from bert_jax.config.presets import load_config
from bert_jax.errors import UserError
from bert_jax.objectives.masking import Vocabulary
from bert_jax.planning import roofline
from bert_jax.planning.roofline import (
    CollectiveBytes,
    axis_bandwidth,
    expected_collectives,
    link_seconds,
    parameter_bytes,
    predict,
    program_flops,
)
from bert_jax.planning.workload import workload
from bert_jax.training.pretraining_task import Pretraining
from tests.planning.machines import CHIP, chip_with, run

EMBEDDINGS = 96 * 8 + 64 * 8 + 2 * 8 + 16
LAYER = (8 * 24 + 24) + (8 * 8 + 8) + (8 * 16 + 16) + (16 * 8 + 8) + 32
HEAD = 8 * 8 + 8 + 16 + 96
TOTAL = EMBEDDINGS + 2 * LAYER + HEAD
# Norms and biases are on every device; all else is split over fsdp.
COPIED = 16 + 2 * (24 + 8 + 16 + 8 + 32) + (8 + 16 + 96)
TOKENS = 8 * 16
LINEAR, ATTENTION = 2 * 8 * (4 * 8 + 2 * 16), 4 * 8 * 16
HEAD_FLOPS = 8 * 2 * 2 * 8 * (8 + 96)
"""Forward FLOPs per token and layer, and of the head: 2 predictions in each of 8 rows."""


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("dots", ATTENTION), ("full", LINEAR + ATTENTION)])
def test_matmul_flops(remat, again):
    expected = TOKENS * 2 * (3 * (LINEAR + ATTENTION) + again) + 3 * HEAD_FLOPS
    work = workload(run(remat=remat), 0, Sizes(), 1)
    assert program_flops(work) == expected
    assert program_flops(workload(run(remat=remat), 0, Sizes(), 4)) == expected
    assert predict(run(remat=remat), 0, Sizes(), 1, CHIP).seconds["matmul"] == pytest.approx(expected / (1e12 * 0.5))


def test_program_flops_equal_model_flops():
    """Without remat and packing, the FLOPs of the program are those of MFU."""
    config = run()
    assert program_flops(workload(config, 0, Sizes(), 1)) == predict(config, 0, Sizes(), 1, CHIP).flops


def test_flops_are_those_of_the_task():
    config = load_config("bert_large_lamb")
    for phase, step in ((0, 0), (1, 7038)):
        flops = predict(config, phase, Sizes(256), 32, CHIPS["v5e"]).flops
        assert flops == Pretraining(config, Vocabulary(config.model.vocab_size, 103, ())).step_flops(step)


def test_float32_is_slower_on_chips_with_less_float32_peak():
    one, other = (predict(run(compute_dtype=t), 0, Sizes(), 1, CHIP).seconds for t in ("bfloat16", "float32"))
    assert other["matmul"] == pytest.approx(2 * one["matmul"])
    assert other["hidden"] == pytest.approx(2 * one["hidden"])


def test_elementwise_traffic():
    seconds = predict(run(), 0, Sizes(), 1, CHIP).seconds
    assert seconds["hidden"] == pytest.approx(2 * TOKENS * 8 * roofline.HIDDEN_ACCESSES * 2 / 1e10)
    assert seconds["scores"] == pytest.approx(2 * 8 * 2 * 16 * 16 * roofline.SCORE_ACCESSES * 2 / 1e10)
    assert seconds["logits"] == pytest.approx(8 * 2 * 96 * roofline.LOGIT_BYTES / 1e10)
    assert predict(run(attention="cudnn", attention_dropout=0.0), 0, Sizes(), 1, CHIP).seconds["scores"] == 0


def test_dropout_costs_its_hash_where_vector_operations_are_slow():
    slow = chip_with(vector_ops=1e6)
    without = predict(run(hidden_dropout=0.0, attention_dropout=0.0), 0, Sizes(), 1, slow).seconds
    with_it = predict(run(), 0, Sizes(), 1, slow).seconds
    scores, hidden = 2 * 8 * 2 * 16 * 16, 2 * TOKENS * 8
    assert with_it["scores"] - without["scores"] == pytest.approx(scores * roofline.HASH_OPS / 1e6)
    assert with_it["hidden"] - without["hidden"] == pytest.approx(hidden * 2 * roofline.HASH_OPS / 1e6)
    again = predict(run(remat="full"), 0, Sizes(), 1, slow).seconds
    assert again["scores"] - without["scores"] == pytest.approx(2 * scores * roofline.HASH_OPS / 1e6)


@pytest.mark.parametrize(("optimizer", "update"), [("adamw", 28), ("lamb", 40)])
def test_parameter_traffic(optimizer, update):
    config = run(optimizer=optimizer)
    assert parameter_bytes(workload(config, 0, Sizes(), 1), optimizer) == (12 + update) * TOTAL
    assert parameter_bytes(workload(config, 0, Sizes(), 2), optimizer) == (2 * 24 + update) * TOTAL
    split = workload(config, 0, Sizes(fsdp=4), 1)
    assert parameter_bytes(split, optimizer) == 12 * TOTAL + update * split.parameters.owned


def test_compiled_bytes_replace_expected_ones():
    sizes = Sizes(data=4)
    expected = predict(run(), 0, sizes, 1, CHIP)
    given = predict(run(), 0, sizes, 1, CHIP, CollectiveBytes(data=3 * expected.collectives.data))
    assert given.seconds["data"] == pytest.approx(3 * expected.seconds["data"])
    assert {k: v for k, v in given.seconds.items() if k != "data"} == {
        k: v for k, v in expected.seconds.items() if k != "data"
    }


def test_step_is_the_sum_and_mfu_follows():
    prediction = predict(run(), 0, Sizes(data=2), 1, CHIP)
    assert prediction.step_seconds == pytest.approx(sum(prediction.seconds.values()))
    assert prediction.mfu == pytest.approx(prediction.flops / prediction.step_seconds / 2e12)
    assert set(prediction.bounds) == set(prediction.seconds)
    assert sum(prediction.share(bound) for bound in ("compute", "memory", "links")) == pytest.approx(1)


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
    prediction = predict(run(), 0, Sizes(data=8, slices=2), 1, chip_with(**figures))
    assert prediction.bound == bound
    assert prediction.share(bound) > 0.9


@pytest.mark.parametrize("name", CHIPS)
def test_more_chips_are_never_more_than_proportionally_faster(name):
    config, chip = load_config("bert_large_lamb"), CHIPS[name]
    phase = dataclasses.replace(config.phases[1], batch_size=16, accumulation=1)
    alone = predict(dataclasses.replace(config, phases=(config.phases[0], phase)), 1, Sizes(), 4, chip).step_seconds
    for count in (2, 8, 64, 256, 2048):
        phases = (config.phases[0], dataclasses.replace(phase, batch_size=16 * count))
        scaled = dataclasses.replace(config, phases=phases)
        prediction = predict(scaled, 1, Sizes(count, slices=slices_for(chip, count)), 4, chip)
        assert prediction.step_seconds > alone
        assert 0 < prediction.mfu < chip.efficiency.matmul


def test_parameters_of_a_device():
    assert workload(run(), 0, Sizes(), 1).parameters == (TOTAL, TOTAL, TOTAL, 0)
    split = TOTAL - COPIED
    assert workload(run(), 0, Sizes(fsdp=4), 1).parameters == (TOTAL, split // 4 + COPIED, TOTAL, split)


def test_one_device_sends_nothing():
    work = workload(run(), 0, Sizes(), 1)
    assert expected_collectives(work) == (0, 0, 0, 0)
    assert sum(link_seconds(expected_collectives(work), Sizes(), CHIP).values()) == 0


def test_data_parallel_gradients_are_reduced_once():
    """For any accumulation: 2 (n - 1) / n of 4 bytes per parameter."""
    for accumulation in (1, 2):
        work = workload(run(), 0, Sizes(data=4), accumulation)
        assert expected_collectives(work) == (pytest.approx(2 * 3 / 4 * 4 * TOTAL), 0, 0, 0)


def test_fsdp_gathers_and_scatters():
    sent = expected_collectives(workload(run(), 0, Sizes(data=2, fsdp=4), 1))
    split = TOTAL - COPIED
    assert sent.fsdp == pytest.approx(3 / 4 * 4 * (2 * split + 2 * COPIED))
    assert sent.data == pytest.approx(2 * 1 / 2 * 4 * (split / 4 + COPIED))


def test_slices_send_their_part_after_the_reduce_scatter():
    sent = expected_collectives(workload(run(), 0, Sizes(data=8, slices=2), 1))
    assert sent.data == pytest.approx(2 * 3 / 4 * 4 * TOTAL)
    assert sent.network == pytest.approx(2 * 1 / 2 * 4 * TOTAL / 4)


@pytest.mark.parametrize(("remat", "times"), [("none", 4), ("dots", 4), ("full", 6)])
def test_tensor_reduces_activations_in_every_layer_and_micro_batch(remat, times):
    work = workload(run(remat=remat, vocab_size=97), 0, Sizes(tensor=2), 2)
    # 97 words cannot be split, so the table needs no all-reduce.
    layers = times * 2 * (4 * 16) * 8 * 2
    assert expected_collectives(work).tensor == pytest.approx(2 * 1 / 2 * layers * 2)
    split_table = expected_collectives(workload(run(remat=remat), 0, Sizes(tensor=2), 2)).tensor
    assert split_table == pytest.approx(2 * 1 / 2 * (layers + 4 * 8 * (4 * 16 + 4 * 2)) * 2)


def test_links_of_a_torus():
    """Two dimensions of 4: an axis along one uses two links, along both four; short ones are lines."""
    assert axis_bandwidth(CHIP, 4, 16) == 2e9
    assert axis_bandwidth(CHIP, 16, 16) == 4e9
    assert axis_bandwidth(CHIP, 2, 16) == 1e9
    assert axis_bandwidth(CHIP, 8, 16) == 2e9
    assert axis_bandwidth(CHIPS["v5e"], 256, 256) == pytest.approx(200e9)
    assert axis_bandwidth(CHIPS["v5e"], 16, 256) == pytest.approx(100e9)


def test_a_switch_gives_every_axis_the_same():
    switched = chip_with(torus_dimensions=0)
    assert axis_bandwidth(switched, 2, 8) == axis_bandwidth(switched, 8, 8) == 1e9


def test_seconds_on_links():
    sizes = Sizes(data=8, fsdp=4, slices=2)
    seconds = link_seconds(CollectiveBytes(data=4e9, fsdp=6e9, tensor=0, network=2e8), sizes, CHIP)
    assert seconds == {"data": 2.0, "fsdp": 3.0, "tensor": 0.0, "network": 2.0}


@pytest.mark.parametrize(
    ("sizes", "accumulation", "message"),
    [
        (Sizes(data=16), 1, "batch_size 8 is not divisible by 16 row shards"),
        (Sizes(data=2), 3, "accumulation 3"),
        (Sizes(tensor=4), 1, "num_heads 2 is not divisible by mesh.tensor 4"),
        (Sizes(data=2, slices=4), 1, "mesh.data 2 does not span 4 slices"),
    ],
)
def test_indivisible_batches_and_meshes_are_refused(sizes, accumulation, message):
    with pytest.raises(UserError, match=message):
        workload(run(), 0, sizes, accumulation)


def test_causal_rows_predict_everywhere_but_at_their_end():
    config = run(direction="causal")
    assert workload(config, 0, Sizes(), 1).predictions == 15
    deeper = dataclasses.replace(config, phases=(dataclasses.replace(config.phases[0], num_layers=2),))
    assert workload(deeper, 0, Sizes(), 1).model.num_layers == 2
