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

from bert_jax.convert.formats import flax_msgpack_reader
from bert_jax.convert.translate import from_huggingface, to_huggingface
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


@pytest.mark.parametrize("name", MODELS)
def test_as_transformers_reads_it(name):
    hf_model = flax_msgpack_reader.read_hf_model(FIXTURES / name)
    expected = json.loads((FIXTURES / name / "expected.json").read_text())
    found = digests(hf_model.tensors.items())
    for twice, once in TIED.items():
        if twice in expected:
            assert twice not in found and expected[twice] == expected[once]
            del expected[twice]
    assert found == expected
    assert {name: list(t.shape) for name, t in hf_model.tensors.lazy_tensors.items()} == {
        n: e[0] for n, e in expected.items()
    }
    assert hf_model.config["architectures"] == [name] and hf_model.source == str(FIXTURES / name)


@pytest.mark.parametrize("name", MODELS)
def test_into_bert_jax_and_back(name):
    hf_model = flax_msgpack_reader.read_hf_model(FIXTURES / name)
    again = to_huggingface(from_huggingface(hf_model), "again")
    assert digests(again.tensors.items()) == digests(hf_model.tensors.items())
    assert again.config["architectures"] == hf_model.config["architectures"]


def test_shards():
    whole, shards = (
        flax_msgpack_reader.read_hf_model(FIXTURES / "BertForPreTraining"),
        flax_msgpack_reader.read_hf_model(FIXTURES / "sharded"),
    )
    assert not (FIXTURES / "sharded" / flax_msgpack_reader.WEIGHTS).exists()
    assert len(list((FIXTURES / "sharded").glob("*.msgpack"))) > 2
    assert digests(whole.tensors.items()) == digests(shards.tensors.items())


def test_is_flax(tmp_path):
    assert flax_msgpack_reader.matches(FIXTURES / "sharded") and flax_msgpack_reader.matches(
        FIXTURES / "BertForPreTraining"
    )
    assert not flax_msgpack_reader.matches(tmp_path)


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(FIXTURES / "BertForPreTraining", tmp_path / "copy")


def test_chunks_and_bfloat16(copy, monkeypatch):
    """Above 1 GiB an array is saved in chunks; in this test the limit is 64 bytes."""
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    tree = {"params": {"bert": {"x": {"kernel": np.arange(60, dtype=np.float32).reshape(6, 10)}}, "every": every}}
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 64)
    content = flax.serialization.msgpack_serialize(tree)
    assert b"__msgpack_chunked_array__" in content
    (copy / flax_msgpack_reader.WEIGHTS).write_bytes(content)
    found = flax_msgpack_reader.read_hf_model(copy).tensors
    np.testing.assert_array_equal(found["bert.x.weight"], tree["params"]["bert"]["x"]["kernel"].T)
    assert found["every"].dtype == every.dtype and found["every"].tobytes() == every.tobytes()


def fails(directory, *words):
    with pytest.raises(UserError) as caught:
        flax_msgpack_reader.read_hf_model(directory)
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
    weights.write_bytes(flax.serialization.to_bytes({"a": np.arange(3)}))
    fails(copy, "'a'", "int64", "weights must be one of")


def test_missing_shard(tmp_path):
    copy = shutil.copytree(FIXTURES / "sharded", tmp_path / "copy")
    shard = sorted(copy.glob("*.msgpack"))[1]
    shard.unlink()
    fails(copy, str(shard), "missing")


def test_configs(copy):
    path = copy / "config.json"
    hf_config = json.loads(path.read_text())
    path.write_text(json.dumps(hf_config | {"model_type": "gpt2"}))
    fails(copy, str(path), "'gpt2' is not one of bert")
    path.write_text(json.dumps(hf_config | {"model_type": "distilbert", "sinusoidal_pos_embds": True}))
    fails(copy, str(path), "sinusoidal_pos_embds")
    for content, words in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        path.write_text(content)
        fails(copy, str(path), words)
    path.unlink()
    fails(copy, str(path), "missing")
