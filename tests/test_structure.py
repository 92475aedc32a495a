"""Structure of the code: files that may use jit and PartitionSpec, lengths, imports without jax."""

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from bert_jax.model.layers import gather_positions
from bert_jax.training import programs

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
PACKAGE = sorted((ROOT / "bert_jax").rglob("*.py"))
SOURCES = [*PACKAGE, *sorted((ROOT / "data_prep").rglob("*.py")), *sorted((ROOT / "scripts").rglob("*.py"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def mentions(attribute: str) -> set[str]:
    """Files of bert_jax whose code (not its comments or docstrings) has this name; analyses compile their own."""

    def has(path: Path) -> bool:
        nodes = ast.walk(ast.parse(path.read_text()))
        return any(
            attribute in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None))
            for node in nodes
        )

    return {name(path) for path in PACKAGE if has(path) and "analysis" not in path.parts}


@pytest.mark.parametrize(
    ("attribute", "files"),
    [
        (
            "jit",
            "bench/floor bench/train_step convert/formats/stablehlo inference/loaded_model interventions/capture "
            "interventions/pruning_masks interventions/smaller_model training/kernel_check training/programs",
        ),
        ("pmap", ""),
        ("pjit", ""),
        ("PartitionSpec", "training/sharding"),
    ],
)
def test_few_files_compile_and_one_shards(attribute, files):
    assert mentions(attribute) == {f"bert_jax/{file}.py" for file in files.split()}


def test_private_modules_of_libraries_are_in_few_files():
    """Each says why there is no other way."""
    private = re.compile(r"^ *(?:from|import) (?!bert_jax|data_prep)[\w.]+(?:\._\w| import _\w)", re.M)
    found = {name(path) for path in SOURCES if private.search(path.read_text())}
    files = {"bert_jax/command/flags.py", "bert_jax/distributed/jax_internals.py"}
    assert found == files | {"scripts/benchmarks/gpu_session.py"}


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_lengths(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES, "split this file: it is too long"
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    }
    assert not long, f"longer than {MAX_FUNCTION_LINES} lines: {long}"


def test_every_module_has_its_layer():
    """The import contracts ignore modules without a layer."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / "setup.cfg")
    layers = re.findall(r"[\w.]+", contracts["importlinter:contract:layers"]["layers"])
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE if path.stem != "__init__"]
    unplaced = [m for m in modules if not any(m == layer or m.startswith(f"{layer}.") for layer in layers)]
    assert not unplaced


BLOCK_JAX = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax"):
            raise ModuleNotFoundError(f"No module named '{name}' (blocked)", name=name)

sys.meta_path.insert(0, Blocker())
"""


def without_jax(statement: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", BLOCK_JAX + statement]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_what_needs_no_jax():
    statement = """
import bert_jax, bert_jax.config, bert_jax.config.presets, bert_jax.tokenizers.tokenizer
import bert_jax.data.corpus, bert_jax.cli.main
import data_prep, data_prep.cli.main
assert bert_jax.Tokenizer and bert_jax.Config and bert_jax.UserError
assert bert_jax.config.presets.load_config("bert_tiny").model.num_layers == 2
"""
    done = without_jax(statement)
    assert done.returncode == 0, done.stderr


def test_the_blocker_blocks():
    done = without_jax("import bert_jax.model.encoder")
    assert done.returncode != 0 and "No module named 'jax' (blocked)" in done.stderr


def test_annotations_are_checked():
    """Also across arguments, which must have the same number of rows."""
    hidden_BSD, positions_BM = jnp.zeros((2, 8, 4)), jnp.zeros((2, 3), jnp.int32)
    assert gather_positions(hidden_BSD, positions_BM).shape == (2, 3, 4)
    for wrong in (jnp.zeros((3, 3), jnp.int32), jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32)):
        with pytest.raises(jaxtyping.TypeCheckError):
            gather_positions(hidden_BSD, wrong)
    with pytest.raises(jaxtyping.TypeCheckError):
        programs.Programs("no task", None)


def test_rank_promotion_is_forbidden():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros((2, 3)) + jnp.zeros(3)
    assert jax.default_backend() == "cpu"
