"""Types in which parameters and gradients cross devices, in the lowered step, and their effect on the gradient."""

import pytest

pytestmark = pytest.mark.slow


def test_sums_in_float32(steps):
    """They are the plain sums, bit for bit."""
    assert steps["sums"]["float32"] == {"distance": 0, "types": ["float32"]}
    assert set(steps["float32"]["collectives"]) == {"all_reduce f32", "reduce_scatter f32", "all_gather f32"}


def test_sums_in_bfloat16(steps):
    """Each gradient is reduced in bfloat16; what reaches the optimizer, parameters and other sums are float32."""
    assert 1e-4 < steps["sums"]["bfloat16"]["distance"] < 1e-2
    assert steps["sums"]["bfloat16"]["types"] == ["float32"]
    assert steps["one, bfloat16"]["collectives"] == steps["one"]["collectives"] == {}, "nothing crosses devices"
    assert 1e-4 < steps["bfloat16"]["distance"] < 1e-2
    for name in ("bfloat16", "bfloat16, tensor, 2 micro-batches"):
        found = steps[name]["collectives"]
        reductions = {kind: n for kind, n in found.items() if not kind.startswith("all_gather")}
        assert set(reductions) <= {"all_reduce bf16", "reduce_scatter bf16"}, name
        assert reductions["all_reduce bf16"] == steps["parameters"], name
    assert steps["bfloat16"]["collectives"]["reduce_scatter bf16"] > 0


def test_kernels_cross_devices_in_the_type_of_their_product(steps):
    """Those of layers; the gradient is the same, bit for bit, and is reduced in float32."""
    control = steps["bfloat16 products, gathered in float32"]
    assert "all_gather bf16" not in control["collectives"] and 1e-4 < control["distance"] < 0.1
    assert steps["bfloat16 products"]["beside control"] == 0
    for name in ("bfloat16 products", "bfloat16 products, tensor, 2 micro-batches"):
        found = steps[name]["collectives"]
        assert found["all_gather bf16"] == steps["kernels"], name
        assert not found.get("all_reduce bf16") and not found.get("reduce_scatter bf16"), name
    assert steps["bfloat16 products"]["collectives"]["all_gather f32"] > 0, "embeddings and heads"
