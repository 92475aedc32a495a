"""TensorFlow's checkpoints: what TensorFlow wrote is read to the bit, what is damaged is named in one line."""

import shutil
from pathlib import Path

import google_crc32c
import ml_dtypes
import numpy as np
import pytest

from bert_jax.convert.formats import leveldb_table, tensor_bundle
from bert_jax.convert.formats.tensor_bundle import open_bundle
from bert_jax.errors import UserError
from tests.golden import tensor_bundle_recipe as recipe

GOLDEN = Path(__file__).parent.parent / "golden" / "tensor_bundle"


def identical(first: np.ndarray, second: np.ndarray) -> bool:
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and np.ascontiguousarray(first).tobytes() == np.ascontiguousarray(second).tobytes()
    )


@pytest.fixture
def several(tmp_path):
    """A copy of the checkpoint in three shards: its prefix."""
    shutil.copytree(GOLDEN / "bert", tmp_path / "bert")
    return tmp_path / "bert" / "model.ckpt-7"


def rewrite(path: Path, change) -> None:
    content = bytearray(path.read_bytes())
    changed = change(content)
    path.write_bytes(content if changed is None else changed)


def refused(prefix: Path) -> str:
    """The message, when everything is read."""
    with pytest.raises(UserError) as caught:
        bundle = open_bundle(prefix)
        for name in list(bundle):
            bundle[name]
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


def test_other_dtypes_of_tensorflow_and_no_strings():
    expected = recipe.others() | {"bfloat16": np.array(recipe.BFLOAT16, ml_dtypes.bfloat16)}
    bundle = open_bundle(GOLDEN / "others" / "others.ckpt")
    assert list(bundle) == sorted(expected)
    for name, array in expected.items():
        assert identical(bundle[name], array), name


def test_a_tensor_is_a_view_of_the_file():
    array = open_bundle(GOLDEN / "albert" / "model.ckpt-best")["bert/embeddings/word_embeddings"]
    assert not array.flags.writeable
    base = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


@pytest.mark.parametrize("block_bytes", [1, 300, 1 << 18], ids=["a block per tensor", "some blocks", "one block"])
def test_what_is_written_is_read(tmp_path, block_bytes):
    names = [f"layer_{number}/{part}" for number in range(40) for part in ("kernel", "bias")]
    arrays = {name: recipe.values(name, (3, 2)) for name in names} | recipe.others()
    arrays["bfloat16"] = np.array(recipe.BFLOAT16, ml_dtypes.bfloat16)
    arrays["transposed"] = recipe.values("transposed", (3, 5)).T
    arrays["swapped"] = np.arange(3, dtype=">i4")
    tensor_bundle.write(tmp_path / "model.ckpt", arrays, block_bytes)
    bundle = open_bundle(tmp_path / "model.ckpt")
    assert list(bundle) == sorted(arrays)
    for name, array in arrays.items():
        assert identical(bundle[name], array.astype(array.dtype.newbyteorder("<"))), name
    index = (tmp_path / "model.ckpt.index").read_bytes()
    number = len(blocks(index))
    assert number == {1: len(arrays) + 1, 300: number, 1 << 18: 1}[block_bytes]
    assert (number > 1) == (block_bytes < 1 << 18)


def blocks(index: bytes) -> list[tuple[int, int]]:
    """Offset and size of the data blocks of a table, by its index block, which the footer's second handle names."""
    footer = index[-48:]
    _, place = leveldb_table._handle(footer, 0)
    handle, _ = leveldb_table._handle(footer, place)
    return [
        leveldb_table._handle(value, 0)[0] for _, value in leveldb_table._entries(leveldb_table._block(index, handle))
    ]


def test_the_data_and_the_entries_are_tensorflows(tmp_path):
    """One shard: data file and index entries equal those of TensorFlow, byte for byte."""
    tensorflow_prefix = GOLDEN / "albert" / "model.ckpt-best"
    written_prefix = tmp_path / "ours.ckpt"
    bundle = open_bundle(tensorflow_prefix)
    tensor_bundle.write(written_prefix, {name: bundle[name] for name in reversed(list(bundle))})
    assert (
        tensor_bundle.shard_path(written_prefix, 0, 1).read_bytes()
        == tensor_bundle.shard_path(tensorflow_prefix, 0, 1).read_bytes()
    )
    indices = [tensor_bundle.index_path(prefix).read_bytes() for prefix in (written_prefix, tensorflow_prefix)]
    ((_, size),) = blocks(indices[1])
    assert size > 1000 and indices[0][:size] == indices[1][:size]


def test_the_same_tensors_give_the_same_bytes(tmp_path):
    arrays = {"b": np.ones(3, np.float32), "a": np.zeros((2, 2), np.int32)}
    for name, order in (("one", arrays), ("two", dict(reversed(arrays.items())))):
        tensor_bundle.write(tmp_path / name, order)
    for suffix in (".index", ".data-00000-of-00001"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_a_dtype_that_tensorflow_has_not(tmp_path):
    with pytest.raises(UserError, match="tensor 'x' has dtype <U1"):
        tensor_bundle.write(tmp_path / "model.ckpt", {"x": np.array(["a"])})
    assert not (tmp_path / "model.ckpt.index").exists()


def test_masked_crc_of_leveldb():
    """CRC-32C of 32 zeros as RFC 3720 B.4 gives it, masked by hand."""
    crc = google_crc32c.value(bytes(32))
    assert crc == 0x8A9136AA
    rotated = (0x8A9136AA >> 15) | (0x8A9136AA << 17) & 0xFFFFFFFF
    assert leveldb_table.mask(crc) == (rotated + 0xA282EAD8) % (1 << 32)


def flip(place: int, bit: int):
    def change(content) -> None:
        content[place] ^= bit

    return change


INDEX_DAMAGES = {
    "truncated": (lambda content: content[:-1], "model.ckpt-7.index: truncated or damaged"),
    "no middle": (lambda content: content[:100] + content[-48:], "truncated or damaged (a block ends at byte"),
    "empty": (lambda content: content.clear(), "model.ckpt-7.index: truncated or damaged"),
    **{f"byte {place}": (flip(place, 4), "does not match its CRC-32C") for place in (0, 50, 2000, -60)},
}


@pytest.mark.parametrize("name", INDEX_DAMAGES)
def test_a_damaged_index(several, name):
    change, message = INDEX_DAMAGES[name]
    rewrite(tensor_bundle.index_path(several), change)
    assert message in refused(several)


def test_flipped_byte_in_the_data(several):
    path = tensor_bundle.shard_path(several, 2, 3)
    rewrite(path, flip(1000, 1))
    message = refused(several)
    assert f"{path}: tensor 'bert/" in message and "is damaged (CRC-32C)" in message
    bundle = open_bundle(several)
    intact = "cls/seq_relationship/output_bias"
    assert identical(bundle[intact], recipe.values(intact, (2,)))  # the others can still be read


def test_files_that_are_missing_or_not_supported(several):
    rewrite(tensor_bundle.shard_path(several, 2, 3), lambda content: content[:-1])
    assert f"{tensor_bundle.shard_path(several, 2, 3)}: truncated, tensor '" in refused(several)
    tensor_bundle.shard_path(several, 1, 3).unlink()
    assert f"{tensor_bundle.shard_path(several, 1, 3)} is missing" in refused(several)
    assert f"{several.parent / 'x.ckpt'}.index is missing" in refused(several.parent / "x.ckpt")
    v1 = "v1.ckpt: a checkpoint of TensorFlow's format V1 (one file)"
    assert v1 in refused(GOLDEN / "v1" / "v1.ckpt")
    assert "variable 'sliced' is partitioned" in refused(GOLDEN / "partitioned" / "partitioned.ckpt")


def with_index(prefix: Path, header: dict, entry: dict | None = None) -> Path:
    """A handmade index, and 8 bytes of data."""
    items = [(b"", tensor_bundle._Header(**header).SerializeToString())]
    if entry is not None:
        items.append((b"x", tensor_bundle._Entry(**entry).SerializeToString()))
    tensor_bundle.index_path(prefix).write_bytes(leveldb_table.make_table(items))
    tensor_bundle.shard_path(prefix, 0, 1).write_bytes(bytes(8))
    return prefix


@pytest.mark.parametrize(
    ("header", "entry", "said"),
    [
        ({"num_shards": 1, "endianness": 1}, None, "big-endian"),
        ({"num_shards": 1, "version": {"min_consumer": 2}}, None, "its format 2 is newer"),
        ({"num_shards": 1}, {"dtype": 1, "size": 8}, "the entry of tensor 'x' contradicts itself"),
        ({"num_shards": 1}, {"dtype": 1, "size": 4, "shard_id": 1}, "the entry of tensor 'x' contradicts itself"),
        ({"num_shards": 1}, {"dtype": 1, "size": 4, "offset": -4}, "the entry of tensor 'x' contradicts itself"),
        ({"num_shards": 1}, {"dtype": 8, "size": 8}, "tensor 'x' has TensorFlow's dtype 8"),
    ],
)
def test_unsupported_indices(tmp_path, header, entry, said):
    assert said in refused(with_index(tmp_path / "model.ckpt", header, entry))


def test_a_table_that_is_no_checkpoint(tmp_path):
    for items, said in (([], "it has no header"), ([(b"", b"\xff")], "the header cannot be read")):
        tensor_bundle.index_path(tmp_path / "model.ckpt").write_bytes(leveldb_table.make_table(items))
        assert said in refused(tmp_path / "model.ckpt")


def test_compressed_block(tmp_path):
    prefix = with_index(tmp_path / "model.ckpt", {"num_shards": 1})
    path = tensor_bundle.index_path(prefix)
    index = path.read_bytes()
    ((_, size),) = blocks(index)
    block = index[:size] + b"\1"
    path.write_bytes(block + leveldb_table.mask(google_crc32c.value(block)).to_bytes(4, "little") + index[size + 5 :])
    assert "model.ckpt.index: the block at byte 0 is compressed" in refused(prefix)
