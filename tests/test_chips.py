"""The table of chips: chip of a device, and plausible figures."""

from unittest import mock

import jax
import pytest

from bert_jax.chips import CHIPS, Sizes, chip_of
from bert_jax.training import reporter

KINDS = {
    "v3": ["TPU v3"],
    "v4": ["TPU v4"],
    "v5e": ["TPU v5 lite", "TPU v5e"],
    "v5p": ["TPU v5", "TPU v5p"],
    "v6e": ["TPU v6 lite"],
    "a100": ["NVIDIA A100-SXM4-80GB"],
    "l40s": ["NVIDIA L40S"],
    "h100": ["NVIDIA H100 80GB HBM3"],
    "h200": ["NVIDIA H200"],
    "b200": ["NVIDIA B200"],
}


def test_the_longest_matching_name_is_used():
    for name, kinds in KINDS.items():
        assert [chip_of(kind).name for kind in kinds] == [name] * len(kinds)
    assert chip_of("cpu") is None and chip_of("NVIDIA L4") is None


def test_peak_of_devices_is_that_of_their_chips():
    device = mock.Mock(spec=jax.Device, device_kind="TPU v5 lite")
    assert reporter.peak_flops([device] * 4) == 4 * 197e12


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_figures_are_in_their_units(chip):
    """FLOP/s, bytes/s and bytes: a factor of 1,000 or 8 leaves these bounds."""
    assert 5e13 < chip.peak_flops < 5e15
    assert 1e12 < chip.vector_ops < 1e14
    assert 4e11 < chip.memory_bandwidth < 1e13
    assert 1e10 < chip.memory < 2e11
    assert 3e10 < max(1, 2 * chip.torus_dimensions) * chip.link_bandwidth < 1e12
    assert 1e9 < chip.network_bandwidth < 1e11 < chip.memory_bandwidth
    assert all(0 < share <= 1 for share in chip.efficiency)
    assert 9e8 < chip.clock < 2e9 if chip.torus_dimensions else chip.clock == 0


def test_sizes():
    sizes = Sizes(data=4, fsdp=2, tensor=3)
    assert sizes.devices == 24 and sizes.row_shards == 8
