"""Bytes that devices send, and their time on links, against sums computed by hand."""

import dataclasses

import pytest

from bert_jax.chips import CHIPS, Sizes
from bert_jax.errors import UserError
from bert_jax.planning.collectives import CollectiveBytes, axis_bandwidth, expected_collectives, link_seconds
from bert_jax.planning.workload import workload
from tests.planning.machines import CHIP, chip_with, run

EMBEDDINGS = 96 * 8 + 64 * 8 + 2 * 8 + 16
LAYER = (8 * 24 + 24) + (8 * 8 + 8) + (8 * 16 + 16) + (16 * 8 + 8) + 32
HEAD = 8 * 8 + 8 + 16 + 96
TOTAL = EMBEDDINGS + 2 * LAYER + HEAD
# Norms and biases are on every device; all else is split over fsdp.
COPIED = 16 + 2 * (24 + 8 + 16 + 8 + 32) + (8 + 16 + 96)


def test_parameters_on_one_device():
    parameters = workload(run(), 0, Sizes(), 1).parameters
    assert parameters == (TOTAL, TOTAL, TOTAL, 0)


def test_parameters_over_fsdp():
    parameters = workload(run(), 0, Sizes(fsdp=4), 1).parameters
    split = TOTAL - COPIED
    assert parameters == (TOTAL, split // 4 + COPIED, TOTAL, split)


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
