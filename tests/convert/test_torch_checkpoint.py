"""Pickles: both formats, exactly, and without executing anything. Needs the extra `parity`."""

import argparse
import builtins
import os
import pickle
import shutil

import ml_dtypes
import numpy as np
import pytest

from bert_jax.convert.formats import input_formats, tensor_files, torch_checkpoint
from bert_jax.errors import UserError

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

FORMATS = {"zip": True, "legacy": False}
BITS = np.arange(2**16, dtype=np.uint16)


def save(content, path, new):
    torch.save(content, path, _use_new_zipfile_serialization=new)


@pytest.fixture
def state():
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(4, 3),
        "transposed": torch.randn(4, 3).T,
        "half": torch.randn(5).half(),
        "every": torch.from_numpy(BITS.view(np.int16)).view(torch.bfloat16).reshape(256, 256),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "view": torch.arange(10.0)[3:6],
        "embeddings.position_ids": torch.arange(4)[None],
    }


def bits(array) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def assert_same(found, state):
    assert set(found) == set(state)
    for name, tensor in state.items():
        raw = tensor.detach().contiguous()
        torch_state = (raw.view(torch.int16) if raw.dtype == torch.bfloat16 else raw).numpy()
        assert found[name].dtype.name == str(tensor.dtype).removeprefix("torch.")
        assert found.lazy_tensors[name].shape == found[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(bits(found[name]), bits(torch_state))


@pytest.mark.parametrize("new", FORMATS.values(), ids=FORMATS)
def test_state_dicts(tmp_path, state, new):
    save(state, tmp_path / "pytorch_model.bin", new)
    assert (tmp_path / "pytorch_model.bin").read_bytes().startswith(b"PK") == new
    assert_same(tensor_files.open_tensors(tmp_path), state)


def test_torch_reads_what_was_written(tmp_path):
    tensors = {
        "a": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32).T,
        "every": BITS.view(ml_dtypes.bfloat16),
        "half": np.ones((2, 2), np.float16),
    }
    tensors["half"].flags.writeable = False
    tensors["reversed"] = np.arange(3, dtype=np.float32)[::-1]
    torch_checkpoint.save(tmp_path / "pytorch_model.bin", tensors)
    torch_state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    np.testing.assert_array_equal(torch_state["a"].numpy(), tensors["a"])
    np.testing.assert_array_equal(torch_state["every"].view(torch.int16).numpy().view(np.uint16), BITS)
    assert torch_state["half"].dtype == torch.float16
    assert_same(tensor_files.open_tensors(tmp_path), torch_state)


def fails(path, *words, placeholders=False):
    with pytest.raises(UserError) as caught:
        torch_checkpoint.load(path, placeholders=placeholders)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    for word in words:
        assert word in message, message


class Calls:
    """A pickle that calls a function when it is read."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("placeholders", [False, True], ids=["weights", "checkpoint"])
@pytest.mark.parametrize("new", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", ["posix.system", "builtins.eval", "shutil.copy"])
def test_code_is_not_executed(tmp_path, state, new, name, placeholders):
    trace = tmp_path / "executed"
    calls = {
        "posix.system": Calls(os.system, f"touch {trace}"),
        "builtins.eval": Calls(builtins.eval, f"__import__('pathlib').Path({str(trace)!r}).touch()"),
        "shutil.copy": Calls(shutil.copy, __file__, str(trace)),
    }
    path = tmp_path / "pytorch_model.bin"
    save({"model": state, "args": calls[name]}, path, new)
    fails(path, "refused", name, placeholders=placeholders)
    assert not trace.exists()
    # The pickle executes its code if it is allowed to.
    torch.load(path, weights_only=False)
    assert trace.exists()


@pytest.mark.parametrize("new", FORMATS.values(), ids=FORMATS)
def test_placeholders_do_nothing(tmp_path, new):
    """Names that may stand in a checkpoint are not imported either, whatever they would do."""
    trace = tmp_path / "executed"
    path = tmp_path / "checkpoint.pt"
    before = set(map(str, torch.serialization.get_safe_globals()))
    runstring = np.testing.runstring if hasattr(np.testing, "runstring") else np.testing._private.utils.runstring
    save({"model": {}, "extra": Calls(runstring, f"open({str(trace)!r}, 'w')", {})}, path, new)
    assert isinstance(torch_checkpoint.load(path, placeholders=True)["extra"], torch_checkpoint.Placeholder)
    assert not trace.exists()
    fails(path, "refused", "runstring")
    assert set(map(str, torch.serialization.get_safe_globals())) == before


@pytest.mark.parametrize("new", FORMATS.values(), ids=FORMATS)
def test_damaged(tmp_path, state, new):
    path = tmp_path / "pytorch_model.bin"
    save(state, path, new)
    whole = path.read_bytes()
    for size in (0, 1, 40, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        fails(path, "truncated")
    path.write_bytes(b"<html>" * 50)
    fails(path, "not a file of torch.save")
    path.write_bytes(pickle.dumps({"a": 1}))
    fails(path, "not a file of torch.save")
    fails(tmp_path / "none.bin", "does not exist")


def test_other_things(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save(torch.nn.Linear(2, 2), path)
    fails(path, "refused", "torch.nn.modules.linear.Linear")
    torch.save([torch.zeros(2)], path)
    with pytest.raises(UserError, match="holds list, not a state dict"):
        tensor_files.open_tensors(tmp_path)
    torch.save(
        {"good": torch.ones(2), "odd": torch.ones(2, dtype=torch.int8), "sparse": torch.eye(3).to_sparse()}, path
    )
    found = tensor_files.open_tensors(tmp_path)
    assert found["good"].sum() == 2
    for name, dtype in (("odd", "int8"), ("sparse", "float32")):
        with pytest.raises(UserError, match=rf"pytorch_model\.bin: tensor '{name}' has type {dtype}"):
            found[name]


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_a_state_dict_in_the_file_of_a_trainer(tmp_path, state, key):
    torch.save({key: state, "epoch": 3, "optimizer": {"lr": 1.0}}, tmp_path / "pytorch_model.bin")
    assert_same(tensor_files.open_tensors(tmp_path), state)


STATE = {"a": torch.zeros(1)}
NEITHER = "not a checkpoint of fairseq or NVIDIA. If it is a state dict, name it pytorch_model.bin"
KINDS = {
    "args": ({"model": STATE, "args": argparse.Namespace(x=1)}, "not a fairseq RoBERTa"),
    "cfg": ({"model": STATE, "cfg": {"model": {}}, "args": None}, "not a fairseq RoBERTa"),
    "no settings": ({"model": STATE, "optimizer": {}, "epoch": 3}, r"bert_config\.json is missing"),
    "a state dict": (STATE, NEITHER),
    "nothing": ({}, NEITHER),
    "a list": ([1], NEITHER),
}
"""Content of a file -> message of the reader that takes it: fairseq's, NVIDIA's or none."""


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(tmp_path, kind):
    content, message = KINDS[kind]
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(UserError, match=message), input_formats.open_model(tmp_path / "x.pt"):
        pass
