"""Scores of items: intervals, paired tests against SciPy's, files; `bert-jax analyse --compare`."""

import json

import numpy as np
import pytest
from etils import epath
from scipy import stats

from bert_jax.analysis import analyse, comparison, item_scores, result_files
from bert_jax.analysis.item_scores import ItemScores
from bert_jax.analysis.suite import ITEMS
from bert_jax.cli import main as cli
from bert_jax.errors import UserError
from tests.analysis.test_analyse import SUITE

RNG = np.random.default_rng(0)
ANSWERS = RNG.choice([0.0, 0.5, 1.0], 60, p=[0.3, 0.1, 0.6])
OTHERS = RNG.choice([0.0, 0.5, 1.0], 60, p=[0.5, 0.1, 0.4])
GROUPS = ["a"] * 40 + ["b"] * 15 + ["c"] * 5


def scores(values, others=None, groups=None, **more) -> ItemScores:
    columns = {"model": np.array(values), "random_weights": np.zeros(len(values)) if others is None else others}
    return ItemScores(tuple(f"a.jsonl, line {i}" for i in range(len(values))), groups, columns, **more)


@pytest.mark.parametrize("groups", [None, GROUPS])
def test_an_interval_is_that_of_the_bootstrap(groups):
    """Against resampled items, one group after the other."""
    rng = np.random.default_rng(5)
    parts = [ANSWERS] if groups is None else [ANSWERS[np.array(groups) == name] for name in "abc"]
    resampled = np.mean([rng.choice(part, (20_000, len(part))).mean(1) for part in parts], axis=0)
    found = item_scores.bootstrap_mean(ANSWERS, groups)
    assert found.value == pytest.approx(np.mean([part.mean() for part in parts]))
    np.testing.assert_allclose(found[1:], np.quantile(resampled, [0.025, 0.975]), atol=0.01)
    assert found.high - found.low > 0.15


def test_groups_of_one_item_have_a_spread():
    """60 UIDs with one pair each are drawn as 60 pairs without UIDs; one pair has no interval."""
    alone = item_scores.bootstrap_mean(ANSWERS, [str(i) for i in range(60)])
    expected = stats.bootstrap((ANSWERS,), np.mean, method="percentile", rng=np.random.default_rng(3))
    np.testing.assert_allclose(alone[1:], expected.confidence_interval, atol=0.01)
    mixed = item_scores.bootstrap_mean(np.r_[ANSWERS, 1.0], ["a"] * 60 + ["b"])
    assert mixed.high - mixed.low > 0.4 and mixed.low < mixed.value < mixed.high <= 1
    one = item_scores.bootstrap_mean(np.array([1.0]))
    assert one == (1, None, None) and item_scores.with_interval(one._asdict()) == "100.0 (one item, no interval)"
    difference = item_scores.paired_difference(np.array([1.0]), np.array([0.0]))
    assert difference == (1, None, None, 1) and json.dumps(difference, allow_nan=False)


@pytest.mark.parametrize("groups", [None, GROUPS])
def test_a_p_value_is_that_of_a_permutation_test(groups):
    members = [np.ones(60, bool)] if groups is None else [np.array(groups) == name for name in "abc"]

    def mean_difference(x, y, axis):
        x, y = np.moveaxis(x, axis, -1), np.moveaxis(y, axis, -1)
        return np.mean([(x - y)[..., one].mean(-1) for one in members], axis=0)

    expected = stats.permutation_test(
        (ANSWERS, OTHERS), mean_difference, permutation_type="samples", vectorized=True, rng=np.random.default_rng(1)
    )
    found = item_scores.paired_difference(ANSWERS, OTHERS, groups)
    assert found.difference == pytest.approx(expected.statistic)
    assert found.p_value == pytest.approx(expected.pvalue, abs=0.01)
    assert 0.001 < found.p_value < 0.8
    assert item_scores.paired_difference(ANSWERS, ANSWERS, groups).p_value == 1


def test_no_difference_is_found_in_one_test_of_twenty(monkeypatch):
    """Of 400 pairs of models with equal answers in the mean, about 5 % have p below 0.05, and 5 % miss 0."""
    monkeypatch.setattr(item_scores, "RESAMPLES", 400)
    rng = np.random.default_rng(2)
    found = [item_scores.paired_difference(*rng.binomial(1, 0.7, (2, 200)).astype(float), seed=i) for i in range(400)]
    assert 0.02 < np.mean([one.p_value < 0.05 for one in found]) < 0.08
    assert 0.02 < np.mean([not one.low <= 0 <= one.high for one in found]) < 0.09


def test_a_file_of_items(tmp_path):
    tests = {"pairs": scores(ANSWERS, OTHERS, tuple(GROUPS)), "words": scores([1.0, 0.5])}
    path = epath.Path(tmp_path / "a.items.jsonl")
    path.write_bytes(item_scores.to_json_lines(tests))
    found = item_scores.read_json_lines(path, "remove it")
    for name, one in tests.items():
        assert found[name][:2] == one[:2]
        for column, values in one.scores.items():
            np.testing.assert_array_equal(found[name].scores[column], values)


def line_of(scores='{"model": 1}', item='"b"', more="") -> str:
    return f'{{"test": "a", "item": {item}, "scores": {scores}{more}}}'


@pytest.mark.parametrize(
    "damage",
    [
        b'{"test": "pairs"',
        b'{"test": 1}',
        b"",
        b"\xff\xfe",
        *(line_of(f'{{"model": {value}}}').encode() for value in ('"1"', "true", "1e999", "NaN", "9" * 400, "[]")),
        line_of("{}").encode(),
        line_of("[1]").encode(),
        line_of(item="[]").encode(),
        line_of(more=', "group": 1').encode(),
    ],
)
def test_a_damaged_file_of_items(tmp_path, damage):
    path = epath.Path(tmp_path / "a.items.jsonl")
    path.write_bytes(damage)
    with pytest.raises(UserError, match=r"a.items.jsonl, line 1.*remove it"):
        item_scores.read_json_lines(path, "remove it")


@pytest.mark.parametrize("second", [line_of(more=', "group": "g"'), line_of('{"model": 1, "lone_mask": 0}')])
def test_items_of_a_test_are_alike(tmp_path, second):
    path = epath.Path(tmp_path / "a.items.jsonl")
    path.write_text(f"{line_of()}\n{second}\n")
    with pytest.raises(UserError, match=r"a.items.jsonl, line 2"):
        item_scores.read_json_lines(path, "remove it")


def test_names_with_any_separator_of_lines(tmp_path):
    """A UID may have one: only a line feed ends a line of the file."""
    groups = ("a\u2028b", "c\x85d", "e\x0cf")
    path = epath.Path(tmp_path / "a.items.jsonl")
    path.write_bytes(item_scores.to_json_lines({"pairs": scores([1.0, 0.0, 0.5], groups=groups)}))
    assert item_scores.read_json_lines(path, "")["pairs"].groups == groups


def test_items_that_one_model_lacks_are_left_out():
    ours, theirs = scores([1.0, 1.0, 0.0, 1.0]), scores([0.0, 0.0, 1.0])
    theirs = theirs._replace(items=("a.jsonl, line 3", "a.jsonl, line 0", "x"))
    (row,) = comparison.compare("cloze", {"t": ours, "alone": ours}, {"t": theirs})
    assert (row["items"], row["only_model"], row["only_other"]) == (2, 2, 1)
    assert (row["model"]["value"], row["other"]["value"], row["difference"]["difference"]) == (1, 0, 1)
    with pytest.raises(UserError, match="no item of t in common"):
        comparison.compare("cloze", {"t": ours}, {"t": theirs.select(["x"])})
    with pytest.raises(UserError, match="t of models with different tokenizers has other candidates"):
        comparison.refuse_other_tokenizer(
            [{"uncertainty": {"u": {"same_tokenizer": False}, "t": {"same_tokenizer": True}}}]
        )
    rows = comparison.adjust([{**row, "difference": {**row["difference"], "p_value": p}} for p in (0.03, 0.01, 0.02)])
    assert [one["adjusted_p_value"] for one in rows] == pytest.approx([0.04, 0.03, 0.04])


MODELS: list[str] = []


def run_with_items(inputs, settings):
    """The first model answers as ANSWERS, the second one as OTHERS."""
    digest = result_files.model_sha256(inputs.model)
    MODELS.extend([digest] if digest not in MODELS else [])
    return {"total": 0.0, "texts": 1, "words": 3, ITEMS: {"test": scores((ANSWERS, OTHERS)[MODELS.index(digest)])}}


@pytest.fixture
def call(monkeypatch, tmp_path):
    MODELS.clear()
    monkeypatch.setattr(analyse, "SUITES", (SUITE._replace(run=run_with_items), SUITE._replace(name="uncounted")))
    (tmp_path / "data" / "text").mkdir(parents=True)
    (tmp_path / "data" / "text" / "a.txt").write_text("A text.")
    return lambda *words: cli.main(["analyse", *map(str, words), "--out", str(tmp_path / "out")])


def test_two_checkpoints(tiny_run, tmp_path, call, capsys):
    first = min((tiny_run / "checkpoints").iterdir())
    flags = ("--data", tmp_path / "data", "--compare", first)
    assert call(tiny_run, *flags) == 0
    (row,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["tests"]
    expected = item_scores.paired_difference(ANSWERS, OTHERS)
    assert row["difference"] == expected._asdict() and row["adjusted_p_value"] == expected.p_value
    page, printed = (tmp_path / "out" / "report.html").read_text(), capsys.readouterr().out
    assert "two models compared" in page and str(first) in page
    assert f"words: test, 60 items: {100 * ANSWERS.mean():.1f} % against {100 * OTHERS.mean():.1f} %" in printed
    assert "random weights" in page  # the table of intervals beside baselines
    items = tmp_path / "out" / "words.items.jsonl"
    items.write_text(items.read_text().split("\n", 1)[1])
    assert call(tiny_run, *flags) == 2
    assert "words.items.jsonl has other items than" in capsys.readouterr().err
    items.unlink()
    assert call(tiny_run, *flags) == 2
    assert "words.items.jsonl is missing: remove" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--compare", "RUN"), "has the weights of"),
        (("--compare", "FIRST", "--checkpoints", "all"), "--compare needs --data, and takes the newest checkpoint"),
        (("--compare", "FIRST", "--suites", "uncounted"), "none of the suites that ran counts items"),
        (("--compare", "nowhere"), "nowhere"),
    ],
)
def test_wrong_comparisons(tiny_run, tmp_path, call, capsys, flags, message):
    paths = {"RUN": tiny_run, "FIRST": min((tiny_run / "checkpoints").iterdir())}
    assert call(tiny_run, "--data", tmp_path / "data", *(paths.get(flag, flag) for flag in flags)) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out" / "comparison.json").exists()
