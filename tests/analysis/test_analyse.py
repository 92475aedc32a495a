"""`bert-jax analyse`: choice of suites, checkpoints, resuming, refusals, and the page; with a suite of the test."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from bert_jax import provenance
from bert_jax.analysis import analyse, probes, result_files
from bert_jax.analysis.suite import Scalar, Suite, SuiteInputs, UnsuitedError
from bert_jax.cli import main as cli
from bert_jax.errors import UserError
from bert_jax.field_validation import Count
from bert_jax.model.heads import Heads
from bert_jax.report import Note
from tests.interventions.models import small_model

CALLS = []


@dataclass(frozen=True)
class Settings:
    """Of the suite of this test."""

    words: Count = 3
    """Number of words."""


def run(inputs: SuiteInputs, settings: Settings) -> dict:
    CALLS.append(settings)
    scale = inputs.model.params["encoder"]["final_norm" if "final_norm" in inputs.model.params["encoder"] else "pooler"]
    total = float(sum(np.abs(x).sum() for x in scale.values()))
    texts = [path.read_text() for path in inputs.files("text", ".txt")]
    if any("bad" in text for text in texts):
        raise UserError(f"{inputs.data}/text: a bad text")
    return {"total": np.float32(total), "texts": len(texts), "undefined": float("nan"), "words": settings.words}


SUITE = Suite(
    "words",
    Settings,
    ("text",),
    run,
    lambda result: (Note(f"{result['texts']} texts."),),
    lambda result: {"sum of weights": Scalar(result["total"], {"no words": 0.0}), "words": Scalar(result["words"])},
)
TREES = SUITE._replace(name="some-trees", folders=("treebank",))


@pytest.fixture(autouse=True)
def suites(monkeypatch):
    CALLS.clear()
    monkeypatch.setattr(analyse, "SUITES", (SUITE, TREES))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data" / "text").mkdir(parents=True)
    (tmp_path / "data" / "text" / "a.txt").write_text("A text.")
    return tmp_path / "data"


def call(*words) -> int:
    return cli.main(["analyse", *map(str, words)])


def test_a_result_a_page_and_a_second_call(tiny_run, data, tmp_path, capsys):
    out = tmp_path / "out"
    assert call(tiny_run, "--data", data, "--out", out, "--words.words", 5) == 0
    file = json.loads((out / "words.json").read_text())
    assert file["result"]["words"] == 5 and file["result"]["undefined"] is None
    assert file["request"]["settings"] == {"words": 5} and file["request"]["suite"] == "words"
    page, printed = (out / "report.html").read_text(), capsys.readouterr()
    assert "1 texts." in page and "some-trees was left out" in page and "<script" not in page
    assert "words: words  5" in printed.out and "(no words 0)" in printed.out and "no folder treebank" in printed.err
    assert call(tiny_run, "--data", data, "--out", out, "--words.words", 5) == 0
    assert len(CALLS) == 1 and "done before" in capsys.readouterr().err
    assert (out / "report.html").read_text() == page
    (out / "words.json").write_text(json.dumps(file | {"result": {"words": []}}))
    assert call(tiny_run, "--data", data, "--out", out, "--words.words", 5) == 2
    assert "words.json: the result was changed after it was written: choose another" in capsys.readouterr().err


def test_a_suite_that_finds_nothing_to_use_is_left_out(tiny_run, data, tmp_path, capsys, monkeypatch):
    def run_unsuited(inputs, settings):
        raise UnsuitedError("nothing fits")

    unsuited = SUITE._replace(name="unsuited", run=run_unsuited)
    monkeypatch.setattr(analyse, "SUITES", (SUITE, unsuited))
    words = (tiny_run, "--data", data, "--out", tmp_path / "out")
    assert call(*words) == 0 and "unsuited was left out: nothing fits" in capsys.readouterr().err
    assert call(*words, "--suites", "unsuited") == 2
    assert capsys.readouterr().err.strip().endswith("error: --suites unsuited: nothing fits")


def test_a_second_call_with_other_suites_keeps_the_first_ones_on_the_page(tiny_run, data, tmp_path):
    (data / "treebank").mkdir()
    (data / "treebank" / "a.txt").write_text("")
    out = tmp_path / "out"
    assert call(tiny_run, "--data", data, "--out", out, "--suites", "words") == 0
    assert call(tiny_run, "--data", data, "--out", out, "--suites", "some-trees") == 0
    assert len(CALLS) == 2
    page = (out / "report.html").read_text()
    assert page.count("1 texts.") == 2


def test_results_of_other_code_are_computed_again(tiny_run, data, tmp_path, capsys, monkeypatch):
    (data / "treebank").mkdir()
    out = tmp_path / "out"
    assert call(tiny_run, "--data", data, "--out", out) == 0
    assert len(CALLS) == 2
    capsys.readouterr()
    monkeypatch.setattr(result_files, "code_version", lambda suite: "changed")
    assert call(tiny_run, "--data", data, "--out", out, "--suites", "words") == 0
    assert len(CALLS) == 3 and (out / "report.html").read_text().count("1 texts.") == 1
    error = capsys.readouterr().err
    by = provenance.describe_code(provenance.code())
    for path, what, advice in (
        ("words.json", "words is computed again", ""),
        ("some-trees.json", "some-trees is left out", "; add it to --suites"),
    ):
        assert f"note: {what}: {out / path} was made by other code, {by}; now {by}{advice}\n" in error
    assert json.loads((out / "words.json").read_text())["request"]["code"] == "changed"
    assert call(tiny_run, "--data", data, "--out", out, "--suites", "words") == 0
    assert len(CALLS) == 3  # equal code: the file is used


def test_a_version_is_of_the_source_of_the_suite(tmp_path):
    assert (
        result_files.code_version(SUITE) == result_files.code_version(TREES) != result_files.code_version(probes.SUITE)
    )
    (tmp_path / "a.py").write_text("x = 1")
    nested = tmp_path / "task/data/train.jsonl"
    nested.parent.mkdir(parents=True)
    digests = {result_files.data_sha256(tmp_path, ("task",)) for text in "ab" if nested.write_text(text)}
    assert len(digests) == 2, "files in folders count"
    before = result_files._source_digest(tmp_path)
    result_files._source_digest.cache_clear()
    (tmp_path / "a.py").write_text("x = 2")
    assert result_files._source_digest(tmp_path) != before


@pytest.mark.parametrize("what", ["run", "study"])
def test_a_run_or_a_study_keeps_its_page(tiny_run, data, tmp_path, capsys, what):
    out = tiny_run if what == "run" else tmp_path / "study"
    if what == "study":
        out.mkdir()
        (out / "study.json").write_text("{}")
        (out / "report.html").write_text("the study's page")
    before = sorted(path.name for path in out.iterdir())
    assert call(tiny_run, "--data", data, "--out", out) == 2
    assert f"--out {out} is the directory of a {what}: give a directory" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == before and not CALLS


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--words.words", 4), "words.json is the result of --words.words 3, now 4: choose another --out"),
        (("--seed", 1), "words.json is the result of seed 0, now 1"),
        ("text", "words.json is the result of other data"),
    ],
)
def test_results_of_another_request_are_kept(tiny_run, data, tmp_path, capsys, changed, message):
    out = tmp_path / "out"
    assert call(tiny_run, "--data", data, "--out", out) == 0
    before = (out / "words.json").read_bytes()
    if changed == "text":
        (data / "text" / "b.txt").write_text("Another text.")
        changed = ()
    assert call(tiny_run, "--data", data, "--out", out, *changed) == 2
    assert message in capsys.readouterr().err
    assert (out / "words.json").read_bytes() == before


def test_all_checkpoints_of_a_run(tiny_run, data, tmp_path):
    out = tmp_path / "out"
    assert call(tiny_run, "--data", data, "--out", out, "--checkpoints", "all") == 0
    steps = sorted(path.name for path in out.iterdir() if path.is_dir())
    assert len(steps) >= 2 and len(CALLS) == len(steps)
    totals = [json.loads((out / step / "words.json").read_text())["result"]["total"] for step in steps]
    assert len(set(totals)) == len(totals)
    page = (out / "report.html").read_text()
    assert "over the checkpoints" in page and "no words" in page and "stroke-dasharray" in page
    curves = json.loads((out / "curves.json").read_text())["curves"]["words"]
    assert curves["sum of weights"] == {str(int(step)): total for step, total in zip(steps, totals, strict=True)}
    assert set(curves["sum of weights (no words)"].values()) == {0.0}
    assert call(tiny_run, "--data", data, "--out", out, "--checkpoints", str(int(steps[0]))) == 0
    assert len(CALLS) == len(steps)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--suites", "word"), "--suites word: did you mean 'words'?"),
        (("--suites", "some-trees"), "has no folder treebank"),
        (("--checkpoints", "7777"), "has no checkpoint 7777; "),
        (("--checkpoints", "first"), "give newest, all, or steps"),
        (("--words.words", "many"), "--words.words"),
        (("--seed", "-1"), "--seed is -1: it must be a whole number in [0, 2147483647]"),
        (("--seed", str(10**30)), "--seed is 1000"),
        (("--view-least", "7"), "--view-least is 7: it must be a number in [0, 1]"),
        (("--data", "nowhere"), "--data nowhere is not a directory"),
        (("--out", __file__), "is a file, not a directory; choose another path"),
    ],
)
def test_wrong_requests(tiny_run, data, tmp_path, capsys, flags, message):
    given = {"--data": data, "--out": tmp_path / "out"} | dict([flags])
    assert call(tiny_run, *(word for pair in given.items() for word in pair)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "out" / "report.html").exists()


@pytest.mark.slow
def test_an_export_has_no_checkpoints(tiny_export, data, tmp_path, capsys):
    assert call(tiny_export, "--data", data, "--out", tmp_path / "out", "--checkpoints", "all") == 2
    assert "is not a run" in capsys.readouterr().err
    assert call(tiny_export, "--data", data, "--out", tmp_path / "out") == 0


def test_a_failed_suite_leaves_no_result(tiny_run, data, tmp_path, capsys):
    (data / "text" / "b.txt").write_text("bad")
    assert call(tiny_run, "--data", data, "--out", tmp_path / "out") == 2
    assert "a bad text" in capsys.readouterr().err and not list((tmp_path / "out").glob("*.json"))


def test_suites_that_need_an_mlm_head(data):
    inputs = SuiteInputs(small_model(Heads(mlm=False)), data, 0, progress=False)
    settings = Settings()
    assert SUITE.obstacle(inputs, settings) is None
    assert SUITE._replace(needs_mlm_head=True).obstacle(inputs, settings) == "the model has no MLM head"
    assert "treebank" in TREES.obstacle(inputs, settings)
    either = SUITE._replace(folders=("text", "treebank"))
    assert "treebank" in either.obstacle(inputs, settings)
    assert either._replace(any_folder=True).obstacle(inputs, settings) is None
    needed = SUITE._replace(required=("words",))
    assert needed.obstacle(inputs, settings) is None
    assert needed.obstacle(inputs, Settings(words=0)) == "--words.words not given"
