"""Random flags and configs: exit code 0, 2 or 75, one line on stderr, and no other exception.

``BERT_JAX_FUZZ_EXAMPLES=1000 python -m pytest tests/cli/test_fuzz.py`` draws this number of new examples per test.
Without it, the same few examples are drawn every time.
"""

import contextlib
import io
import json
import os
import pathlib
import shlex

import pytest
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from bert_jax import config as config_lib
from bert_jax.cli import main as cli
from bert_jax.config import presets
from bert_jax.errors import UserError
from bert_jax.training.run_directory import workdir
from tests.cli.test_flags import ARGUMENTS, flags_of

fuzz = settings(
    max_examples=int(os.environ.get("BERT_JAX_FUZZ_EXAMPLES", "12")),
    derandomize="BERT_JAX_FUZZ_EXAMPLES" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
WORDS = """
0 -1 1 1.5 7 64 1e3 1e400 -1e-400 inf -inf nan 1_000 0x10 +3 --3 2147483648 10000000000000 1e13
None null True - -- = [] {} * ( %s $HOME ~ . .. é ² 😀 a/b ftp://x gelu lamb auto
"""
VALUES = st.one_of(
    st.sampled_from([*WORDS.split(), "", " ", "a b", "\n", "\t\x1b[31m", "\u2028", "\ufeff", "x" * 5000, "9" * 5000]),
    st.integers().map(str),
    st.floats().map(str),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
    st.binary(max_size=8).map(lambda data: os.fsdecode(data.replace(b"\0", b""))),
)
EXCLUDED = (
    "--plot",
    "--cluster.process",
    "--cluster.notices",
    "--on-event",
    "--compilation-cache",
    "--help",
    "--help-all",
    "--topology",
)
"""Flags that write to other places, wait for other processes, send requests, run commands, change this process, or
compile."""
CONFIGS = st.sampled_from(["bert_tiny", "bert_base", "modern_base"])


def names_of(command: str) -> list[str]:
    return [name for flag in flags_of(command) for name in flag.names if name not in EXCLUDED]


@st.composite
def command_lines(draw) -> list[str]:
    command = draw(st.sampled_from(list(ARGUMENTS)))
    own = st.sampled_from(names_of(command))
    other = st.sampled_from([name for any_command in ARGUMENTS for name in names_of(any_command)])
    underscored = own.map(lambda flag: f"--{flag[2:].replace('-', '_')}")
    names = st.one_of(own, own, own, own, own, underscored, other, VALUES.map("--{}".format))
    value = st.sampled_from(["0", "1", "2", "8", "64", "0.5", "None"]) | VALUES
    words = []
    for _ in range(draw(st.integers(0, 3))):
        flag, values = draw(names), draw(st.lists(value, min_size=1, max_size=1) | st.lists(value, max_size=2))
        words += [f"{flag}={values[0]}", *values[1:]] if values and draw(st.booleans()) else [flag, *values]
    first, *required = ARGUMENTS[command]
    first = draw(CONFIGS | VALUES) if first == "bert_base" else first
    return [command, first, *draw(st.sampled_from([required, required[:1]])), *words]


def outcome(arguments: list[str]) -> int:
    """Run a command and check its output."""
    note(shlex.join(arguments))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    lines = err.getvalue().splitlines()
    assert code in (0, 2, 75), code
    # `doctor` prints its findings to stdout.
    assert len(lines) == (code != 0 and not (arguments[:1] == ["doctor"] and out.getvalue())), lines
    assert all(line.startswith("error: ") and " at 0x" not in line and len(line) < 2100 for line in lines), lines
    return code


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    """A directory that must contain only the files that the tests write."""
    for (
        command
    ) in ARGUMENTS:  # not at the first draw: what the commands import may use `random`, which strategies must not
        names_of(command)
    directory, before = tmp_path_factory.mktemp("fuzz"), pathlib.Path.cwd()
    os.chdir(directory)
    yield directory
    os.chdir(before)
    assert {path.name for path in directory.iterdir()} <= {"run", "mine.py", "mine.json"}


@fuzz
@given(command_lines() | st.lists(VALUES, max_size=3))
def test_flags(arguments):
    outcome(arguments)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just(10**13)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)
BASE = {
    "config": config_lib.to_dict(presets.load_config("bert_base")),
    "stream_version": 1,
    "fingerprint": "0" * 64,
    "corpora": {"0" * 64: 1.0},
    "corpus_paths": ["nowhere"],
}
PATHS = [*config_lib.flatten(BASE), "config", "config.model", "config.phases", "config.phases.0", "corpora"]


def changed(path: str, act: str, value) -> dict:
    """BASE with one change at a dotted path."""
    tree = node = json.loads(json.dumps(BASE))
    *parents, last = path.split(".")
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node[name]
    key = int(last) if isinstance(node, list) else last
    if act == "remove":
        del node[key]
    elif act == "set" or isinstance(node, list):
        node[key] = value
    else:
        node[f"{key}_"] = value
    return tree


def mangled(text: str, start: int, length: int, new: str) -> str:
    start %= len(text)
    return text[:start] + new + text[start + length :]


changes = st.builds(changed, st.sampled_from(PATHS), st.sampled_from(["set", "set", "set", "remove", "add"]), JSON)
splices = VALUES | st.sampled_from(["[" * 100_000, '{"a":' * 100_000, "Infinity", "NaN", "1e999"])
manglings = st.builds(mangled, st.just(json.dumps(BASE)), st.integers(0, 10**6), st.integers(0, 40), splices)


@fuzz
@given(changes.map(json.dumps) | manglings)
@example("[" * 100_000)
@example("")
def test_the_config_of_a_run(text):
    """A damaged or hand-written config.json."""
    run = pathlib.Path("run")
    run.mkdir(exist_ok=True)
    (run / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert outcome(["evaluate", "run", "--corpus", "nowhere"]) == 2
    with contextlib.suppress(UserError):
        there = workdir.read_run(run)
        assert all(isinstance(share, float | int) for share in there["corpora"].values())
        assert config_lib.to_dict(workdir.read_config(run)).keys() == BASE["config"].keys()


@fuzz
@given(changes)
def test_a_config_file_that_makes_its_config_from_json(tree):
    """An accepted config can be used."""
    pathlib.Path("mine.json").write_text(json.dumps(tree))
    source = "import json, pathlib\nfrom bert_jax.config import from_dict\n"
    source += "config = lambda: from_dict(json.loads(pathlib.Path('mine.json').read_text())['config'])\n"
    pathlib.Path("mine.py").write_text(source)
    outcome(["schedule", "mine.py", "--json"])
