"""TensorFlow's checkpoints: what TensorFlow wrote is read to the bit, what is damaged is named in one line.

One test needs a Python with tensorflow-cpu: this one, or the one that $BERT_JAX_TENSORFLOW_PYTHON names.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import google_crc32c
import ml_dtypes
import numpy as np
import pytest

from bert_jax.convert.formats import leveldb_table, tensor_bundle
from bert_jax.convert.formats.tensor_bundle import open_bundle
from bert_jax.errors import UserError
from bert_jax.storage.varints import encode_varint
from tests.golden import tensor_bundle_recipe as recipe

GOLDEN = Path(__file__).parent.parent / "golden" / "tensor_bundle"


def identical(first: np.ndarray, second: np.ndarray) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


@pytest.fixture
def several(tmp_path):
    """A copy of the checkpoint in three shards: its prefix."""
    shutil.copytree(GOLDEN / "bert", tmp_path / "bert")
    return tmp_path / "bert" / "model.ckpt-7"


def refused(prefix: Path) -> str:
    """The message, when everything is read."""
    with pytest.raises(UserError) as caught:
        dict(open_bundle(prefix))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_weights_of_tensorflow_in_three_shards():
    shapes = recipe.with_slots(recipe.bert_variables())
    bundle = open_bundle(GOLDEN / "bert" / "model.ckpt-7")
    assert list(bundle) == sorted([*shapes, "global_step"])
    for name, shape in shapes.items():
        assert bundle.lazy_tensors[name].shape == shape
        assert identical(bundle[name], recipe.values(name, shape)), name
    assert identical(bundle["global_step"], np.array(recipe.STEP, np.int64))


def others() -> dict[str, np.ndarray]:
    """The arrays of the other golden checkpoint whose dtype weights or steps may have."""
    arrays = recipe.others() | {"bfloat16": np.array(recipe.BFLOAT16, ml_dtypes.bfloat16)}
    del arrays["flags"]
    return arrays


def test_other_dtypes_of_tensorflow():
    bundle, expected = open_bundle(GOLDEN / "others" / "others.ckpt"), others()
    assert list(bundle) == sorted(expected)
    assert all(identical(bundle[name], array) for name, array in expected.items())


def test_what_is_written_is_read_and_is_what_tensorflow_writes(tmp_path):
    """Data file and index entries are equal byte for byte, in any order of the tensors."""
    tensorflow_prefix, written_prefix = GOLDEN / "albert" / "model.ckpt-best", tmp_path / "ours.ckpt"
    bundle = open_bundle(tensorflow_prefix)
    tensor_bundle.write(written_prefix, {name: bundle[name] for name in reversed(list(bundle))})
    data = [tensor_bundle.shard_path(prefix, 0, 1).read_bytes() for prefix in (written_prefix, tensorflow_prefix)]
    assert data[0] == data[1]
    ours, theirs = (tensor_bundle.index_path(p).read_bytes() for p in (written_prefix, tensorflow_prefix))
    size = len(leveldb_table._encode(leveldb_table.read_table(theirs, ""), leveldb_table.RESTART_INTERVAL))
    assert size > 1000 and ours[:size] == theirs[:size]
    arrays = others() | {"transposed": recipe.values("transposed", (3, 5)).T}
    tensor_bundle.write(tmp_path / "others.ckpt", arrays)
    bundle = open_bundle(tmp_path / "others.ckpt")
    assert list(bundle) == sorted(arrays) and all(identical(bundle[name], arrays[name]) for name in arrays)


def test_masked_crc_of_leveldb():
    """CRC-32C of 32 zeros as RFC 3720 B.4 gives it, masked by hand."""
    assert google_crc32c.value(bytes(32)) == 0x8A9136AA
    rotated = (0x8A9136AA >> 15) | (0x8A9136AA << 17) & 0xFFFFFFFF
    assert leveldb_table.mask(0x8A9136AA) == (rotated + 0xA282EAD8) % (1 << 32)


def test_an_index_of_several_blocks():
    """As TensorFlow writes one of more than 256 KiB."""

    def block(entries) -> bytes:
        size = len(leveldb_table._encode(entries, leveldb_table.RESTART_INTERVAL))
        return leveldb_table.make_table(entries)[: size + 5]  # with its trailer

    def handle(offset: int, content: bytes) -> bytes:
        return encode_varint(offset) + encode_varint(len(content) - 5)

    items = [(f"scope_{i // 7}/tensor_{i:03}".encode(), bytes([i])) for i in range(60)]
    first, second = block(items[:40]), block(items[40:])
    index = block([(items[39][0], handle(0, first)), (items[59][0], handle(len(first), second))])
    footer = bytes(2) + handle(len(first + second), index)
    content = first + second + index + footer.ljust(40, b"\0") + leveldb_table.MAGIC
    assert list(leveldb_table.read_table(content, "")) == items


PYTHON = os.environ.get("BERT_JAX_TENSORFLOW_PYTHON") or (importlib.util.find_spec("tensorflow") and sys.executable)
RESTORE = """
import sys
import numpy as np
import tensorflow as tf

dtypes = tf.train.load_checkpoint(sys.argv[1]).get_variable_to_dtype_map()
arrays = tf.raw_ops.RestoreV2(
    prefix=sys.argv[1], tensor_names=list(dtypes), shape_and_slices=[""] * len(dtypes), dtypes=list(dtypes.values())
)
arrays = {name: array.numpy() for name, array in zip(dtypes, arrays)}
np.savez(sys.argv[2], **{name: a.view(np.uint16) if a.dtype == "bfloat16" else a for name, a in arrays.items()})
"""


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="no TensorFlow: BERT_JAX_TENSORFLOW_PYTHON names no Python that has it")
def test_tensorflow_reads_what_is_written(tmp_path):
    """Tensors for a block of more than 256 KiB, and all dtypes."""
    names = [f"{number:04}_{'x' * 60}" for number in range(5000)]
    arrays = {name: recipe.values(name, (2,)) for name in names} | others()
    tensor_bundle.write(tmp_path / "model.ckpt", arrays)
    command = [PYTHON, "-c", RESTORE, str(tmp_path / "model.ckpt"), str(tmp_path / "back.npz")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    arrays["bfloat16"] = arrays["bfloat16"].view(np.uint16)
    with np.load(tmp_path / "back.npz") as back:
        assert set(back) == set(arrays) and all(identical(back[name], arrays[name]) for name in arrays)


def flip(place: int):
    """A change of one bit."""
    return lambda content: content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :] if content else b""


DATA = "data-00002-of-00003"
DAMAGES = {
    "truncated": ("index", lambda content: content[:-1], "model.ckpt-7.index: truncated, damaged or compressed"),
    "no middle": ("index", lambda content: content[:100] + content[-48:], "the block at byte"),
    "empty": ("index", lambda content: b"", "its end is missing"),
    **{f"byte {place}": ("index", flip(place), "does not match its CRC-32C") for place in (0, 50, 2000)},
    "a value": (DATA, flip(1000), "model.ckpt-7.data-00002-of-00003: tensor 'bert/"),
    "half the data": (DATA, lambda content: content[: len(content) // 2], "is damaged (CRC-32C)"),
    "no data": (DATA, None, "model.ckpt-7.data-00002-of-00003 with tensor 'bert/"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint(several, name):
    suffix, change, message = DAMAGES[name]
    path = several.with_name(f"{several.name}.{suffix}")
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    assert message in refused(several)
    if name == "a value":  # the others can still be read
        intact = "cls/seq_relationship/output_bias"
        assert identical(open_bundle(several)[intact], recipe.values(intact, (2,)))


def test_a_partitioned_variable():
    assert "'sliced' is damaged, or of a partitioned variable" in refused(GOLDEN / "partitioned" / "partitioned.ckpt")


@pytest.mark.parametrize(
    ("header", "entry", "said"),
    [
        ({}, None, "not a checkpoint of TensorFlow"),
        ({"num_shards": 1, "endianness": 1}, None, "not a checkpoint of TensorFlow, or of a kind"),
        ({"num_shards": 1, "version": {"min_consumer": 2}}, None, "not a checkpoint of TensorFlow, or of a kind"),
        ({"num_shards": 1}, {"dtype": 1, "size": 8}, "the entry of tensor 'x' is damaged"),
        ({"num_shards": 1}, {"dtype": 1, "size": 4, "shard_id": 1}, "model.ckpt.data-00001-of-00001 with tensor 'x'"),
        ({"num_shards": 1}, {"dtype": 1, "size": 4, "offset": -4}, "tensor 'x'"),
        ({"num_shards": 1}, b"\xff", "tensor 'x' cannot be read"),
        (b"\xff", None, "the header cannot be read"),
    ],
)
def test_unsupported_indices(tmp_path, header, entry, said):
    """Handmade, with 8 bytes of data."""
    prefix = tmp_path / "model.ckpt"
    items = [(b"", header if isinstance(header, bytes) else tensor_bundle._Header(**header).SerializeToString())]
    if entry is not None:
        items.append((b"x", entry if isinstance(entry, bytes) else tensor_bundle._Entry(**entry).SerializeToString()))
    tensor_bundle.index_path(prefix).write_bytes(leveldb_table.make_table(items))
    tensor_bundle.shard_path(prefix, 0, 1).write_bytes(bytes(8))
    assert said in refused(prefix)
