"""What is chosen for the devices, and that every refusal names the setting."""

import dataclasses
from contextlib import nullcontext

import pytest

from bert_jax.config import Config, MeshConfig, ModelConfig, Phase
from bert_jax.errors import UserError
from bert_jax.training.implementation import check_devices, check_kernel_memory, choose_implementation

MODEL = ModelConfig(attention="pallas_tpu")
GPU, TPU, TPU_V3 = "NVIDIA H100 80GB HBM3", "TPU v5 lite", "TPU v3"


def config(attention: str = "auto", *, rate: float = 0.1, seq_len: int = 128, tensor: int = 1, **model):
    model = ModelConfig(attention=attention, attention_dropout=rate, **{"head_size": 64} | model)
    return Config("x", model, phases=(Phase(seq_len=seq_len),), mesh=MeshConfig(tensor=tensor))


@pytest.mark.parametrize(
    ("kind", "settings", "chosen"),
    [
        ("cpu", {}, "deferred"),
        ("cpu", {"rate": 0.0}, "deferred"),
        (GPU, {}, "pallas_gpu"),
        (GPU, {"rate": 0.0, "head_size": 80}, "xla"),
        (GPU, {"head_size": 80}, "reference"),
        (GPU, {"seq_len": 96}, "reference"),
        (GPU, {"tensor": 2}, "reference"),
        (GPU, {"tensor": -1}, "reference"),
        (TPU, {"head_size": 32}, "pallas_tpu"),
        (TPU, {"head_size": 80}, "reference"),
        (TPU, {"num_heads": 3}, "reference"),
        (TPU, {"num_heads": 2, "head_size": 32}, "reference"),
        (TPU, {"seq_len": 64}, "reference"),
        (TPU_V3, {"rate": 0.0}, "xla"),
        ("", {}, "reference"),
        ("", {"rate": 0.0}, "xla"),
    ],
)
def test_auto(kind, settings, chosen):
    assert choose_implementation(config(**settings), kind).model.attention == chosen


UNROLLED = [("cpu", 12, 12), ("cpu", 13, 1), (GPU, 24, 24), (GPU, 25, 1), (TPU, 24, 24), (TPU, 25, 1), ("", 2, 1)]


@pytest.mark.parametrize(("kind", "layers", "chosen"), UNROLLED)
def test_unrolling(kind, layers, chosen):
    deep = Config("x", ModelConfig(num_layers=layers), phases=(Phase(),))
    assert choose_implementation(deep, kind).model.scan_unroll == chosen


def test_other_settings_are_kept():
    """A setting is not replaced, even if the devices do not have it: that is refused later, in one line."""
    assert choose_implementation(config("pallas_tpu"), GPU).model.attention == "pallas_tpu"


@pytest.mark.parametrize(
    ("name", "tensor", "kind", "words"),
    [
        ("pallas_tpu", 1, GPU, ["'pallas_tpu' needs a TPU", GPU]),
        ("pallas_gpu", 1, "cpu", ["'pallas_gpu' needs a GPU", "cpu"]),
        ("pallas_tpu", 1, TPU_V3, ["TPU v4 or newer", TPU_V3]),
        ("pallas_gpu", 2, GPU, ["mesh.tensor 2", "'pallas_gpu'"]),
        ("pallas_tpu", 2, "", ["mesh.tensor 2", "'pallas_tpu'"]),
    ],
)
def test_refusals(name, tensor, kind, words):
    with pytest.raises(UserError) as caught:
        check_devices(config(name).model, tensor, kind)
    assert all(word in str(caught.value) for word in [*words, "set m", "reference"])


@pytest.mark.parametrize(("kind", "refused"), [(GPU, False), ("cpu", False), (TPU, True), ("NVIDIA A100-SXM4", True)])
def test_products_of_8_bit_floats(kind, refused):
    """A device without them is named, and does not prevent the choice of attention."""
    model = choose_implementation(config(dense_dtype="float8"), kind).model
    with pytest.raises(UserError, match=f"{kind}.*set model.dense_dtype compute") if refused else nullcontext():
        check_devices(model, 1, kind)
    check_devices(dataclasses.replace(model, dense_dtype="int8"), 1, kind)


def test_kernels_that_do_not_fit_on_the_chip_are_named():
    """Only these; memory of the device has other remedies."""
    check_kernel_memory("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm", MODEL)
    with pytest.raises(UserError, match="'pallas_tpu' need more memory inside"):
        check_kernel_memory("RESOURCE_EXHAUSTED: in memory space vmem while", MODEL)
