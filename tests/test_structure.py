"""Structure of the code: files that may use jit and PartitionSpec, lengths, imports without jax."""

import ast
import configparser
import functools
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


@functools.cache
def parsed(path: Path) -> tuple[set[str], dict[str, int]]:
    """The names in a file's code (not in its comments or docstrings), and the lines of its functions."""
    names, lines = set(), {}
    for node in ast.walk(ast.parse(path.read_text())):
        names |= {getattr(node, kind) for kind in ("id", "attr", "name") if isinstance(getattr(node, kind, None), str)}
        if isinstance(node, ast.FunctionDef):
            lines[node.name] = max(lines.get(node.name, 0), node.end_lineno - node.lineno + 1)
    return names, lines


def mentions(attribute: str) -> set[str]:
    """Files of bert_jax whose code has this name; analyses compile their own."""
    analyses = "bert_jax/analysis/"
    return {name(path) for path in PACKAGE if not name(path).startswith(analyses) and attribute in parsed(path)[0]}


@pytest.mark.parametrize(
    ("attribute", "files"),
    [
        (
            "jit",
            "bench/floor bench/train_step convert/formats/stablehlo convert/parity/jax_forward inference/loaded_model "
            "interventions/capture interventions/pruning_masks interventions/smaller_model training/kernel_check "
            "training/programs training/replicas",
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


def test_lengths():
    """What is longer is split."""
    files = {name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {file: count for file, count in files.items() if count > MAX_FILE_LINES} == {}
    functions = [(name(path), function, count) for path in SOURCES for function, count in parsed(path)[1].items()]
    assert [one for one in functions if one[-1] > MAX_FUNCTION_LINES] == []


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
