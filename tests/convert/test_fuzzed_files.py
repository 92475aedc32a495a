"""Corrupted model files: a conversion succeeds, or fails with one line and leaves no files.

BERT_JAX_FUZZ_EXAMPLES=20000 tries so many random examples instead of the few that are always the same.
"""

import copy
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from bert_jax.convert.conversion import convert
from bert_jax.convert.families.hf_config_validation import HfConfig
from bert_jax.convert.formats import tensor_files
from bert_jax.errors import UserError
from tests.golden import recipe

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrst"]
SETTINGS = recipe.SETTINGS | {
    "vocab_size": len(WORDS),
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 24,
}
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
SHARD = "model-00001-of-00001.safetensors"

EXAMPLES = os.environ.get("BERT_JAX_FUZZ_EXAMPLES")
FUZZED = settings(
    max_examples=int(EXAMPLES or 25),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

VALUES = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 2, 3, 7, 10**9, 10**13, 2**63, 10**400, -(10**30), 0.5, -0.5, 1e300]),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), "", "x", "gelu", "\ud800", "\0", "a" * 300, "../x"]),
    st.sampled_from([[], {}, [1], ["x"], {"x": 1}, [[1, 2]], {"0": "a", "1": "b"}, [10**13, 0], [0, 10**13], [[]] * 9]),
    st.recursive(st.integers() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=4)),
).map(copy.deepcopy)  # they are changed in place
NAMES = (
    *(*HfConfig.__annotations__, "rope_parameters", "classifier_activation"),
    *("do_lower_case", "tokenizer_class", "mask_token", "added_tokens_decoder", "weight_map", "metadata", "dtype"),
)
TYPES = ("bert", "roberta", "xlm-roberta", "albert", "distilbert", "electra", "modernbert", "mobilebert")
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "C64", "F4", "X")


@pytest.fixture(scope="module")
def model() -> dict[str, dict[str, Any] | bytes]:
    """What a directory holds: JSON as objects, everything else as bytes."""
    tensors = recipe.make_weights(SETTINGS, 3)
    with tempfile.TemporaryDirectory() as scratch:
        tensor_files.write_safetensors(Path(scratch) / WEIGHTS, tensors)
        weights = (Path(scratch) / WEIGHTS).read_bytes()
    return {
        "config.json": {"model_type": "bert", "architectures": ["BertForPreTraining"], "hidden_act": "gelu"} | SETTINGS,
        "tokenizer_config.json": {"do_lower_case": True, "tokenizer_class": "BertTokenizer", "mask_token": "[MASK]"},
        "special_tokens_map.json": {"mask_token": "[MASK]", "cls_token": {"content": "[CLS]", "lstrip": False}},
        INDEX: {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, SHARD)},
        WEIGHTS: weights,
        "vocab.txt": "".join(f"{word}\n" for word in WORDS).encode(),
    }


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a value."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found += [(value, key), *places(child)]
    return found


def mutate(draw, value: dict[str, Any]) -> None:
    """Change, remove or add one thing in an object of JSON, in place."""
    found = places(value)
    container, key = draw(st.sampled_from(found)) if found else (value, "x")
    what = draw(st.sampled_from(["change", "change", "remove", "add", "type"]))
    if what == "remove" and found:
        del container[key]
    elif what == "add":
        value[draw(st.sampled_from(NAMES) | st.text(max_size=5))] = draw(VALUES)
    elif what == "type":
        value["model_type"] = draw(st.sampled_from(TYPES))
    else:
        container[key] = draw(VALUES | st.sampled_from(DTYPES))


def spoil_bytes(draw, content: bytes) -> bytes:
    """Cut off, or with a few bytes replaced."""
    if draw(st.booleans()):
        return content[: draw(st.integers(0, len(content)))]
    place = draw(st.integers(0, max(0, len(content) - 1)))
    return content[:place] + draw(st.binary(max_size=9)) + content[place + draw(st.integers(0, 9)) :]


def spoil_weights(draw, content: bytes) -> bytes:
    """A header that contradicts the content, or a damaged file."""
    if draw(st.booleans()):
        return spoil_bytes(draw, content)
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    mutate(draw, header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


@st.composite
def spoiled(draw, model: dict[str, Any]) -> dict[str, bytes]:
    """The files of a directory, one or two of them spoiled."""
    files = {name: json.loads(json.dumps(v)) if isinstance(v, dict) else v for name, v in model.items()}
    chosen = draw(st.sets(st.sampled_from([*files][:5]), min_size=1, max_size=2))
    if INDEX in chosen:
        files[SHARD] = files.pop(WEIGHTS)
    else:
        del files[INDEX]
    for name in sorted(chosen & files.keys()):
        value = files[name]
        if isinstance(value, bytes):
            files[name] = spoil_weights(draw, value)
            continue
        for _ in range(draw(st.integers(1, 3))):
            mutate(draw, value)
        if draw(st.integers(0, 9)) == 0:
            files[name] = spoil_bytes(draw, json.dumps(value).encode())
    return {name: json.dumps(v).encode() if isinstance(v, dict) else v for name, v in files.items()}


@FUZZED
@given(data=st.data())
def test_files_that_anybody_may_have_edited(model, only_numpy, data):
    files = data.draw(spoiled(model))
    with tempfile.TemporaryDirectory() as scratch, np.errstate(all="ignore"):
        source, place = Path(scratch) / "source", Path(scratch) / "place"
        source.mkdir()
        place.mkdir()
        for name, content in files.items():
            (source / name).write_bytes(content)
        to = data.draw(st.sampled_from(["bert-jax", "huggingface", "tensorflow1"]))
        try:
            convert(source, place / "new", to)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            assert list(place.iterdir()) == []
            event("refused")
        else:
            event("converted")
            assert [path.name for path in place.iterdir()] == ["new"]
