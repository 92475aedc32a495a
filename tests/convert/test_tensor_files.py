"""Tensors of a Hugging Face directory in safetensors: read exactly, lazily, and refused in one line when damaged."""

import json
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from etils import epath

from bert_jax.convert.formats import tensor_files, torch_checkpoint
from bert_jax.convert.tensors import LazyStateDict, LazyTensor, to_lazy_tensors
from bert_jax.errors import UserError

EVERY_BFLOAT16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "bert.a.weight": rng.normal(size=(3, 5)).astype(np.float32),
        "bert.b.weight": rng.normal(size=(7, 2)).astype(np.float16).T,
        "every": EVERY_BFLOAT16.reshape(256, 256),
        "scalar": np.float32(2.5).reshape(()),
    }


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.fixture(params=["safetensors", "pickle"])
def shards(request, tmp_path, tensors):
    """A directory with tensors in two shards, and the names of the index and of the second shard."""
    name, save = tensor_files.SAFETENSORS, tensor_files.write_safetensors
    if request.param == "pickle":
        pytest.importorskip("torch")
        name, save = tensor_files.PICKLE, torch_checkpoint.save
    weight_map = dict(zip(sorted(tensors), ["1 of 2", "1 of 2", "2 of 2", "2 of 2"], strict=True))
    for shard in ("1 of 2", "2 of 2"):
        save(tmp_path / shard, {tensor: tensors[tensor] for tensor in tensors if weight_map[tensor] == shard})
    (tmp_path / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path, tmp_path / f"{name}.index.json"


def test_one_file(tmp_path, tensors):
    """The library reads it, too; also a transposed array, whose memory it would write without regard to strides."""
    assert not tensors["bert.b.weight"].flags.c_contiguous
    tensor_files.write_safetensors(tmp_path / "model.safetensors", tensors)
    found = tensor_files.open_tensors(epath.Path(tmp_path))
    assert {name: (t.shape, t.dtype) for name, t in found.lazy_tensors.items()} == {
        name: (array.shape, array.dtype.name) for name, array in tensors.items()
    }
    assert_same(found, tensors)
    assert_same(safetensors.numpy.load_file(tmp_path / "model.safetensors"), tensors)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards(shards, tensors):
    directory, index = shards
    assert_same(tensor_files.open_tensors(directory), tensors)
    weight_map = json.loads(index.read_text())["weight_map"]
    (directory / "2 of 2").rename(directory / "3")
    fails(directory, str(index), "2 of 2", "missing")
    (directory / "3").rename(directory / "2 of 2")
    index.write_text(json.dumps({"weight_map": weight_map | {"more": "2 of 2"}}))
    fails(directory, "'more' is not in", "2 of 2")


NAMES = ["../elsewhere.safetensors", "/etc/hosts", "..", ".", "", "a" * 300, "a\n", "a\x1b[2J", "\ud800", "a\\b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("{}", "field 'weight_map' is missing"),
        ('{"weight_map": {"a": 3}}', "weight_map.a is 3"),
        ('{"weight_map": {"a": "b"}}', "names the shard b, which is missing"),
        *(
            (json.dumps({"weight_map": {"a": name}}), "it must be a string that is the name of a file")
            for name in NAMES
        ),
    ],
)
def test_damaged_indices(tmp_path, content, words):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    fails(tmp_path, "model.safetensors.index.json", words)


def test_old_names_and_constants(tmp_path):
    """transformers read gamma and beta until 4.x, and saved position_ids until 4.31."""
    ones = np.ones(3, np.float32)
    tensors = {"bert.embeddings.LayerNorm.gamma": ones, "bert.embeddings.LayerNorm.beta": 2 * ones, "gamma": 3 * ones}
    tensors["bert.embeddings.position_ids"] = np.arange(4)[None]
    tensor_files.write_safetensors(tmp_path / "model.safetensors", tensors)
    found = tensor_files.open_tensors(tmp_path)
    assert found["bert.embeddings.position_ids"].tolist() == [[0, 1, 2, 3]]
    assert {name: found[name][0] for name in found if not name.endswith("_ids")} == {
        "bert.embeddings.LayerNorm.weight": 1,
        "bert.embeddings.LayerNorm.bias": 2,
        "gamma": 3,
    }


def test_nothing_is_read_before_it_is_asked_for():
    def read():
        raise AssertionError("read")

    tensors = LazyStateDict({"a": LazyTensor((2, 3), "float32", read)})
    assert "a" in tensors and "b" not in tensors and len(tensors) == 1 and list(tensors) == ["a"]
    assert to_lazy_tensors(tensors)["a"].shape == (2, 3)
    with pytest.raises(AssertionError, match="read"):
        tensors["a"]
    assert to_lazy_tensors({"x": np.zeros((1, 2), np.float16)})["x"][:2] == ((1, 2), "float16")


def fails(directory, *words):
    with pytest.raises(UserError) as caught:
        dict(tensor_files.open_tensors(directory))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.bool_, ml_dtypes.float8_e4m3fn])
def test_no_weights(tmp_path, dtype):
    path = tmp_path / "model.safetensors"
    tensor_files.write_safetensors(path, {"good": np.ones(2, np.float32), "odd": np.ones(2).astype(dtype)})
    assert tensor_files.open_tensors(tmp_path)["good"].sum() == 2
    fails(tmp_path, str(path), "'odd'", "weights must be one of")


def test_without_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    fails(tmp_path, "pytorch_model.bin", "pip install 'torch>=2.6'")
    with pytest.raises(UserError, match=r"pip install 'torch>=2\.6'"):
        torch_checkpoint.save(tmp_path / "out.bin", {})
