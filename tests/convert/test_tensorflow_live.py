"""Beside TensorFlow, live: what it writes we read, what we write it reads, to the bit.

It needs a Python with tensorflow-cpu: this one, or the one that $BERT_JAX_TENSORFLOW_PYTHON names (a virtual
environment of its own: TensorFlow has its own mind about protobuf and numpy). It runs in processes of its own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bert_jax.convert.formats import input_formats, tensor_bundle, tensorflow1
from bert_jax.convert.formats.tensor_bundle import open_bundle
from tests.convert.test_tensor_bundle import GOLDEN, identical, others
from tests.golden import tensor_bundle_recipe as recipe

ROOT = Path(__file__).parent.parent.parent
PYTHON = os.environ.get("BERT_JAX_TENSORFLOW_PYTHON") or (
    sys.executable if importlib.util.find_spec("tensorflow") else None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="no TensorFlow: BERT_JAX_TENSORFLOW_PYTHON names no Python that has it"),
]


def tensorflow(*arguments: object) -> None:
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    command = [PYTHON, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def side(verb: str, first: Path, second: Path) -> None:
    tensorflow("tests/convert/tensorflow_side.py", verb, first, second)


def saved(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def test_the_goldens_are_what_tensorflow_writes(tmp_path):
    """By Saver: several shards, slots, all dtypes; read as the frozen ones are."""
    tensorflow("-m", "tests.golden.make_tensor_bundle", tmp_path)
    for prefix in ("bert/model.ckpt-7", "albert/model.ckpt-best", "others/others.ckpt"):
        fresh, frozen = open_bundle(tmp_path / prefix), open_bundle(GOLDEN / prefix)
        assert list(fresh) == list(frozen)
        assert all(identical(fresh[name], frozen[name]) for name in list(frozen))
    assert len(list((tmp_path / "bert").glob("*.data-*-of-00003"))) == 3


@pytest.fixture
def many():
    """Enough tensors for several index blocks, with names that share prefixes."""
    names = [f"{number:04}_{'x' * 60}" for number in range(5000)]
    names += [f"scope_{number % 70}/tensor_{number}" for number in range(1000)]
    return {name: recipe.values(name, (2,)) for name in names}


def test_several_blocks_of_tensorflows_index(tmp_path, many):
    np.savez(tmp_path / "many.npz", **many)
    side("write", tmp_path / "many.npz", tmp_path / "many.ckpt")
    bundle = open_bundle(tmp_path / "many.ckpt")
    assert list(bundle) == sorted(many)
    assert all(identical(bundle[name], many[name]) for name in many)


def test_tensorflow_reads_our_long_block_and_dtypes(tmp_path, many):
    arrays = many | others()
    tensor_bundle.write(tmp_path / "model.ckpt", arrays)
    side("read", tmp_path / "model.ckpt", tmp_path / "back.npz")
    back = saved(tmp_path / "back.npz")
    arrays["bfloat16"] = arrays["bfloat16"].view(np.uint16)
    assert set(back) == set(arrays) and all(identical(back[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_saver_restores_our_models_under_googles_names(tmp_path, family):
    """Weights, moments and step that were read and written are what the golden checkpoint holds by name."""
    with input_formats.open_model(GOLDEN / family, input_formats.ReadOptions(optimizer_state=True)) as source_model:
        tensorflow1.write(source_model, tmp_path)
    side("restore", tmp_path / "bert_model.ckpt", tmp_path / "back.npz")
    shapes = recipe.albert_variables() if family == "albert" else recipe.with_slots(recipe.bert_variables())
    expected = {name: recipe.values(name, shape) for name, shape in shapes.items()}
    if family == "bert":
        expected["global_step"] = np.array(recipe.STEP, np.int64)
    back = saved(tmp_path / "back.npz")
    assert set(back) == set(expected) and all(identical(back[name], expected[name]) for name in expected)
