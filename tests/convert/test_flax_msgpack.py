"""Models that transformers 4.46.3 itself saved from Flax, against what its own reader makes of them.

fixtures/make_flax.py made both.
"""

import hashlib
import json
import shutil
from pathlib import Path

import flax.serialization
import ml_dtypes
import numpy as np
import pytest

from bert_jax.convert.formats import flax_msgpack_reader, input_formats
from bert_jax.convert.translate import to_huggingface
from bert_jax.errors import UserError

FIXTURES = Path(__file__).parent / "fixtures" / "flax"
MODELS = sorted(path.parent.name for path in FIXTURES.glob("*/expected.json"))
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
    "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
    "vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight",
    "generator_lm_head.weight": "electra.embeddings.word_embeddings.weight",
}
"""What torch saves twice and Flax once."""


def digests(tensors) -> dict[str, list]:
    return {name: [list(a.shape), hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()] for name, a in tensors}


def test_every_family_is_there():
    assert len(MODELS) == 8
    assert {json.loads((FIXTURES / name / "config.json").read_text())["model_type"] for name in MODELS} == {
        *("bert", "roberta", "albert", "distilbert", "electra")
    }


def read(directory: Path) -> input_formats.SourceModel:
    with input_formats.open_model(directory) as source_model:
        return source_model


@pytest.mark.parametrize("name", MODELS)
def test_as_transformers_reads_it(name):
    """And back from bert_jax."""
    source_model = read(FIXTURES / name)
    hf_model = source_model.hf_model
    expected = json.loads((FIXTURES / name / "expected.json").read_text())
    for twice, once in TIED.items():
        if twice in expected:
            assert twice not in hf_model.tensors and expected[twice] == expected[once]
            del expected[twice]
    assert digests(hf_model.tensors.items()) == expected
    assert {name: list(t.shape) for name, t in hf_model.tensors.lazy_tensors.items()} == {
        n: e[0] for n, e in expected.items()
    }
    again = to_huggingface(source_model.model, "again")
    assert digests(again.tensors.items()) == expected
    assert again.config["architectures"] == hf_model.config["architectures"] == [name]


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(FIXTURES / "BertForPreTraining", tmp_path / "copy")


def test_shards(tmp_path):
    copy = shutil.copytree(FIXTURES / "sharded", tmp_path / "copy")
    assert not (copy / flax_msgpack_reader.WEIGHTS).exists() and len(list(copy.glob("*.msgpack"))) > 2
    whole, shards = (read(place).hf_model.tensors for place in (FIXTURES / "BertForPreTraining", copy))
    assert digests(whole.items()) == digests(shards.items())
    shard = sorted(copy.glob("*.msgpack"))[1]
    shard.unlink()
    fails(copy, str(shard), "missing")


def test_chunks_and_bfloat16(tmp_path, monkeypatch):
    """Above 1 GiB an array is saved in chunks; in this test the limit is 64 bytes."""
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    tree = {"params": {"x": {"kernel": np.arange(60, dtype=np.float32).reshape(6, 10)}, "every": every}}
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 64)
    (tmp_path / "x").write_bytes(content := flax.serialization.msgpack_serialize(tree))
    assert b"__msgpack_chunked_array__" in content
    found = flax_msgpack_reader._leaves(tmp_path / "x")
    np.testing.assert_array_equal(found["x", "kernel"], tree["params"]["x"]["kernel"])
    assert found["every",].dtype == every.dtype and found["every",].tobytes() == every.tobytes()


def fails(directory, *words):
    with pytest.raises(UserError) as caught:
        read(directory)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_damaged(copy):
    weights = copy / flax_msgpack_reader.WEIGHTS
    whole = weights.read_bytes()
    for content in (b"", whole[:100], whole[:-1], b"\x05", b"<html>"):
        weights.write_bytes(content)
        fails(copy, str(weights), "truncated")
    tree = flax.serialization.msgpack_restore(whole)
    tree["cls"]["predictions"]["bias"] = tree["cls"]["predictions"]["bias"].astype(np.int64)
    weights.write_bytes(flax.serialization.to_bytes(tree))
    fails(copy, "'cls.predictions.bias'", "int64", "weights must be one of")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not one of bert"),
        ({"model_type": "distilbert", "sinusoidal_pos_embds": True}, "with learned positions"),
        ("{", "is not JSON"),
        (None, "is missing"),
    ],
)
def test_configs(copy, change, words):
    path = copy / "config.json"
    text = path.read_text()
    path.unlink()
    if change is not None:
        path.write_text(change if isinstance(change, str) else json.dumps(json.loads(text) | change))
    fails(copy, str(path), words)
