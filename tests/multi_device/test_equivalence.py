"""One model on one device and on eight, with and without accumulation, is one training run (promise 1)."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.multi_device.hlo import collective_bytes

WORKER = Path(__file__).with_name("worker.py")
ADAMW = ["one/8", "data8", "data8/8", "fsdp8", "fsdp8/8", "cube", "cube/8"]


@pytest.fixture(scope="session")
def outcome():
    process = subprocess.run([sys.executable, str(WORKER)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


@pytest.fixture
def cases(outcome):
    return outcome["cases"]


def test_there_is_something_to_agree_on(outcome):
    """The loss falls by half a nat, and all micro-batches mask different numbers of tokens."""
    losses = outcome["cases"]["one"]["losses"]
    assert losses[0] - losses[-1] > 0.5
    for name, counts in outcome["masked_counts"].items():
        assert len(counts) == len(set(counts)) == 8, (name, counts)
    assert max(outcome["masked_counts"]["one"]) > 1.5 * min(outcome["masked_counts"]["one"])


def test_parameters_really_are_sharded(cases):
    assert cases["one"]["word_shard"] == [512, 128]
    assert cases["data8"]["word_shard"] == [512, 128]
    assert cases["fsdp8"]["word_shard"] == [512, 16]
    assert cases["cube"]["word_shard"] == [256, 64]
    assert cases["cube"]["rise_shard"] == [2, 64, 128]
    # Norms and biases stay whole; they are a few per cent of this small model.
    total = cases["one"]["bytes_total"]
    assert cases["fsdp8"]["bytes_per_device"] < 1.25 * total / 8
    assert cases["cube"]["bytes_per_device"] < 1.25 * total / 4


def test_programs_differ(cases):
    """Else their agreement would mean nothing."""
    assert collective_bytes(cases["one"]["hlo"]) == 0
    for name in ("data8", "fsdp8", "cube"):
        assert collective_bytes(cases[name]["hlo"]) > 1_000_000
    assert "known_trip_count" in cases["one/8"]["hlo"]


@pytest.mark.parametrize("name", ADAMW)
def test_training_agrees_with_one_device(cases, name):
    reference, other = np.array(cases["one"]["losses"]), np.array(cases[name]["losses"])
    assert abs(other[0] - reference[0]) <= 1e-6 * abs(reference[0])
    assert cases[name]["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other, reference, rtol=1e-4)


def test_lamb_agrees_with_one_device(cases):
    reference, other = np.array(cases["lamb one"]["losses"]), np.array(cases["lamb cube"]["losses"])
    assert np.abs(reference - cases["one"]["losses"]).max() > 1e-3, "LAMB trains like AdamW"
    assert abs(other[0] - reference[0]) <= 1e-6 * abs(reference[0])
    assert cases["lamb cube"]["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other, reference, rtol=1e-4)


@pytest.mark.parametrize("name", ["data8", "fsdp8"])
def test_collective_bytes_do_not_grow_with_accumulation(cases, name):
    once, eight_times = (collective_bytes(cases[n]["hlo"]) for n in (name, f"{name}/8"))
    assert eight_times <= 1.01 * once


def test_gradients_cross_devices_once(cases):
    """All-reduce of 4 bytes per parameter, or gather and scatter of as much: no more than the minimum."""
    parameters = cases["one"]["bytes_total"] / 3  # and two moments
    assert collective_bytes(cases["data8"]["hlo"]) <= 1.05 * parameters


def test_a_partial_batch_lies_on_its_devices(outcome):
    """Each of 8 devices has its 3 of 24 rows, in order, and behind them padding: no text, no example, no label."""
    there = outcome["ramp"]["there"]
    for device in range(8):
        own = list(range(3 * device, 3 * device + 3))
        assert there["row"][device][:3] == own
        assert there["example_id"][device] == [[100 + row] for row in own] + [[-1]] * 5
        lengths = [sum(row) for row in there["segment_ids"][device]]
        assert all(lengths[:3]) and not any(lengths[3:])
        labels = [label for (label,) in there["pair_labels"][device]]
        assert set(labels[:3]) <= {0, 1} and labels[3:] == [-1] * 5


def test_a_partial_batch_is_a_batch_of_its_size(outcome):
    """On eight devices with room for 64 rows, and on one with room for 24."""
    found, expected = outcome["ramp"]["found"], outcome["ramp"]["expected"]
    assert found["tokens"] == expected["tokens"] == outcome["ramp"]["tokens"]
    for name in ("loss", "mlm_loss", "pair_loss"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, err_msg=name)
    assert found["pair_accuracy"] == expected["pair_accuracy"]
    assert outcome["ramp"]["gradient_distance"] <= 1e-5


def test_counting_notices_a_reduction_in_the_loop():
    """Positive control of the two tests above, in HLO as XLA writes it."""
    hlo = """
HloModule control
%body (p: f32[2048]) -> f32[2048] {
  %reduced = f32[2048]{0} all-reduce(%x), to_apply=%add
}
ENTRY %main (a: f32[2048]) -> f32[2048] {
  %loop = f32[2048]{0} while(%a), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"4"}}
}
"""
    assert collective_bytes(hlo) == 4 * collective_bytes(hlo.replace('"n":"4"', '"n":"1"')) == 4 * 8192
