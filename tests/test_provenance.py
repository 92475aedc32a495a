"""What results say that they were made by, against git and hashlib; damaged and other provenance."""

import hashlib
import subprocess
from pathlib import Path

import pytest

import bert_jax
from bert_jax import provenance
from bert_jax.field_validation import from_json
from bert_jax.provenance import Code, Provenance, make_provenance
from bert_jax.report.text import render

ROOT = Path(bert_jax.__file__).parents[1]
OTHER = Code(version="0.0.9", commit="", sha256="0123456789abcdef")


def git(directory: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *identity, *words], cwd=directory, check=True, capture_output=True, text=True).stdout


def test_the_code_of_a_checkout_and_of_a_package(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    assert provenance._commit(tmp_path) == ""
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "a tag is no commit")
    commit = git(tmp_path, "rev-parse", "HEAD")[:12]
    assert provenance._commit(tmp_path) == commit
    before = provenance.code_sha256(package)
    assert before == hashlib.sha256(b"a.py\0x = 1\n\0").hexdigest()[:16]
    (package / "configs").mkdir()  # the presets of an installed package
    (package / "configs" / "b.py").write_text("")
    assert provenance.code_sha256(package) == before and provenance._commit(tmp_path) == commit
    (package / "a.py").write_text("x = 2\n")
    assert provenance.code_sha256(package) != before and provenance._commit(tmp_path) == f"{commit}-dirty"


def test_without_git(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    assert provenance._commit(tmp_path) == ""  # a damaged checkout
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance._commit(tmp_path) == ""


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/bert-jax", "analyse", "runs/a b"], "bert-jax analyse 'runs/a b'"),
        (["/src/bert_jax/__main__.py", "report"], "python -m bert_jax report"),
        (["study.py"], "study.py"),
    ],
)
def test_commands(argv, command, monkeypatch):
    monkeypatch.setattr("sys.argv", argv)
    assert make_provenance({})["command"] == command


def test_other_code_is_named_and_this_code_is_not():
    now = provenance.code()
    assert now["version"] == bert_jax.__version__ and len(now["sha256"]) == 16
    same = now | {"commit": "another, of docs alone"}
    made_by = {"seed 0": OTHER, "seed 1": same, "seed 2": None} | {f"seed {i}": OTHER for i in range(3, 8)}
    made = make_provenance({"python": "3"}, made_by=made_by)
    assert list(made["other_code"]) == [f"seed {i}" for i in (0, 3, 4, 5, 6, 7)]
    (note,) = provenance.warnings(made)
    assert note.warning and (
        "other code: seed 0, seed 3, seed 4, seed 5 and 2 more by bert_jax 0.0.9 (SHA-256 0123456789abcdef); "
        f"the rest by bert_jax {now['version']}" in note.text
    )
    assert not provenance.warnings(make_provenance({}, made_by={"seed 1": same}))


def test_the_end_of_a_page():
    """Equal values once, others with the part that they are of; settings that differ come first."""
    configs = {"baseline": {"seed": 1, "model": {"layers": 2}}, "x=b": {"seed": 1, "model": {"layers": 3}, "mix": []}}
    first = make_provenance({"python": "3.11"}, hashes={"model": "aa"}, configs=configs)
    second = first | {"date": "2026-01-01T00:00:00+00:00"}
    shown = [" ".join(line.split()) for line in render(provenance.sections({"a": first, "b": second})).splitlines()]
    assert "environment python 3.11" in shown and "SHA-256 of model aa" in shown
    assert f"date {first['date']} (a)" in shown and "date 2026-01-01T00:00:00+00:00 (b)" in shown
    assert shown.index("model.layers 2 3") < shown.index("seed 1") and "seed 1 1" not in shown
    assert [one.title for one in provenance.sections({"a": make_provenance({})})] == ["provenance"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"date": 7}, "date is 7: it must be a string"),
        ({"code": "0.1.0"}, "code is '0.1.0': it must be an object"),
        ({"code": {"version": "1"}}, "field 'code.commit' is missing"),
        ({"other_code": {"seed 0": 3}}, "other_code.seed 0 is 3"),
        ({"hashes": {"model": 1}}, "hashes.model is 1"),
        ({"configs": []}, "configs is []"),
    ],
)
def test_damaged_provenance_is_one_line(change, message):
    with pytest.raises(bert_jax.UserError, match="run it again") as caught:
        from_json(Provenance, make_provenance({}) | change, "results.json", "run it again")
    assert message in str(caught.value) and "\n" not in str(caught.value)
