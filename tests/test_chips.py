"""The table of chips: chip of a device, and plausible figures."""

from unittest import mock

import jax
import pytest

from bert_jax.chips import CHIPS, Sizes, chip_of, slices_for
from bert_jax.training import reporter


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v3", "v3"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_the_longest_matching_name_is_used(kind, name):
    assert chip_of(kind).name == name


def test_an_unknown_device_has_no_chip():
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
    assert 4e10 < max(1, 2 * chip.torus_dimensions) * chip.link_bandwidth < 1e12
    assert 1e9 < chip.network_bandwidth < 1e11 < chip.memory_bandwidth
    assert all(0 < share <= 1 for share in chip.efficiency)


def test_two_cores_of_v3_share_a_chip():
    assert CHIPS["v3"].peak_flops == 123e12 / 2 and CHIPS["v3"].memory_bandwidth == 450e9


def test_slices():
    assert [slices_for(CHIPS["v5e"], n) for n in (8, 256, 257, 2048)] == [1, 1, 2, 8]
    assert slices_for(CHIPS["h100"], 64) == 8


def test_sizes_multiply():
    sizes = Sizes(data=4, fsdp=2, tensor=3)
    assert sizes.devices == 24 and sizes.row_shards == 8
