"""Each term of the roofline against a sum computed by hand; bottlenecks of a step; limits of the model."""

import dataclasses

import pytest

from bert_jax.chips import CHIPS, Sizes, slices_for
from bert_jax.config.presets import load_config
from bert_jax.objectives.masking import Vocabulary
from bert_jax.planning import roofline
from bert_jax.planning.collectives import CollectiveBytes
from bert_jax.planning.roofline import parameter_bytes, predict, program_flops
from bert_jax.planning.workload import workload
from bert_jax.training.pretraining_task import Pretraining
from tests.planning.machines import CHIP, chip_with, run
from tests.planning.test_collectives import TOTAL

TOKENS = 8 * 16
LINEAR, ATTENTION = 2 * 8 * (4 * 8 + 2 * 16), 4 * 8 * 16
HEAD = 8 * 2 * 2 * 8 * (8 + 96)
"""Forward FLOPs per token and layer, and of the head: 2 predictions in each of 8 rows."""


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("dots", ATTENTION), ("full", LINEAR + ATTENTION)])
def test_matmul_flops(remat, again):
    expected = TOKENS * 2 * (3 * (LINEAR + ATTENTION) + again) + 3 * HEAD
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


def test_one_device_has_no_links():
    seconds = predict(run(), 0, Sizes(), 1, CHIP).seconds
    assert not any(seconds[axis] for axis in ("data", "fsdp", "tensor", "network"))


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
