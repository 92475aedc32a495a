"""Scores of items: intervals, paired tests against SciPy's, files; `bert-jax analyse --compare`."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from etils import epath
from scipy import stats

from bert_jax.analysis import analyse, bootstrap, comparison, item_scores, result_files
from bert_jax.analysis.item_scores import ItemScores
from bert_jax.analysis.suite import ITEMS
from bert_jax.cli import main as cli
from bert_jax.errors import UserError
from bert_jax.inference import loaded_model
from tests.analysis.test_analyse import SUITE

RNG = np.random.default_rng(0)
ANSWERS = RNG.choice([0.0, 0.5, 1.0], 60, p=[0.3, 0.1, 0.6])
OTHERS = RNG.choice([0.0, 0.5, 1.0], 60, p=[0.5, 0.1, 0.4])
GROUPS = ["a"] * 40 + ["b"] * 15 + ["c"] * 5


def scores(values, others=None, groups=None, **more) -> ItemScores:
    columns = {"model": np.array(values), "random_weights": np.zeros(len(values)) if others is None else others}
    return ItemScores(tuple(f"a.jsonl, line {i}" for i in range(len(values))), groups, columns, **more)


def paired_difference(values, others, groups=None, **seed):
    return bootstrap.compare_columns(np.stack([values, others]), None, groups, **seed).differences[0]


@pytest.mark.parametrize("groups", [None, GROUPS])
def test_deviations_over_seeds(groups):
    of_seeds = [RNG.choice([0.0, 1.0], 60) for _ in range(3)]
    parts = [np.arange(60)] if groups is None else [np.flatnonzero(np.array(groups) == name) for name in "abc"]

    def make(random):
        weighted = ItemScores(tuple(map(str, range(60))), None, {"model": random * 3}, {"model": np.arange(60.0)})
        return {"t": scores(ANSWERS, random, groups and tuple(groups)), "words": weighted}

    tests = item_scores.tests_over_seeds(make, of_seeds)
    numbers = [np.mean([one[part].mean() for part in parts]) for one in of_seeds]
    found = item_scores.uncertainty(tests)["t"]["columns"]
    assert found["random_weights"]["value"] == pytest.approx(np.mean(numbers))
    assert found["random_weights"]["deviation_of_seeds"] == pytest.approx(np.std(numbers, ddof=1)) != 0
    assert f" ± {100 * np.std(numbers, ddof=1):.1f}" in item_scores.with_interval(found["random_weights"])
    assert "±" not in item_scores.with_interval(found["model"])
    ratios = [3 * one.sum() / np.arange(60).sum() for one in of_seeds]
    assert tests["words"].deviations == {"model": pytest.approx(np.std(ratios, ddof=1))}
    assert item_scores.tests_over_seeds(make, of_seeds[:1])["t"].deviations is None


@pytest.mark.parametrize("groups", [None, GROUPS])
def test_an_interval_is_that_of_the_bootstrap(groups):
    """Against resampled items, one group after the other."""
    rng = np.random.default_rng(5)
    parts = [ANSWERS] if groups is None else [ANSWERS[np.array(groups) == name] for name in "abc"]
    resampled = np.mean([rng.choice(part, (20_000, len(part))).mean(1) for part in parts], axis=0)
    found = bootstrap.bootstrap_mean(ANSWERS, groups)
    assert found.value == pytest.approx(np.mean([part.mean() for part in parts]))
    np.testing.assert_allclose(found[1:], np.quantile(resampled, [0.025, 0.975]), atol=0.01)
    assert found.high - found.low > 0.15


def test_groups_of_one_item_have_a_spread():
    """60 UIDs with one pair each are drawn as 60 pairs without UIDs; one pair has no interval."""
    each = [str(i) for i in range(60)]
    alone = bootstrap.bootstrap_mean(ANSWERS, each)
    expected = stats.bootstrap((ANSWERS,), np.mean, method="percentile", rng=np.random.default_rng(3))
    np.testing.assert_allclose(alone[1:], expected.confidence_interval, atol=0.01)
    difference = paired_difference(ANSWERS, OTHERS, each)
    expected = stats.bootstrap((ANSWERS - OTHERS,), np.mean, method="percentile", rng=np.random.default_rng(3))
    np.testing.assert_allclose(difference[1:3], expected.confidence_interval, atol=0.015)
    mixed = bootstrap.bootstrap_mean(np.r_[ANSWERS, 1.0], ["a"] * 60 + ["b"])
    assert mixed.high - mixed.low > 0.4 and mixed.low < mixed.value < mixed.high <= 1
    ratios = bootstrap.bootstrap_mean(3 * ANSWERS, each, np.full(60, 3.0))
    np.testing.assert_allclose(ratios, alone, atol=0.01)


def test_one_item_has_no_interval():
    found = bootstrap.compare_columns(np.array([[1.0], [0.0]]))
    assert found.means[0] == (1, None, None) and found.differences == [(1, None, None, 1)]
    assert item_scores.with_interval(found.means[0]._asdict()) == "100.0 (one item, no interval)"
    assert json.dumps(found, allow_nan=False)
    one_known = bootstrap.bootstrap_mean(np.array([[1.0, np.nan], [0.0, 1.0]]))
    np.testing.assert_array_equal(one_known, [[1, 0.5], [np.nan, 0], [np.nan, 1]])


@pytest.mark.parametrize("groups", [None, GROUPS])
def test_a_p_value_is_that_of_a_permutation_test(groups):
    members = [np.ones(60, bool)] if groups is None else [np.array(groups) == name for name in "abc"]

    def mean_difference(x, y, axis):
        x, y = np.moveaxis(x, axis, -1), np.moveaxis(y, axis, -1)
        return np.mean([(x - y)[..., one].mean(-1) for one in members], axis=0)

    expected = stats.permutation_test(
        (ANSWERS, OTHERS), mean_difference, permutation_type="samples", vectorized=True, rng=np.random.default_rng(1)
    )
    found = paired_difference(ANSWERS, OTHERS, groups)
    assert found.difference == pytest.approx(expected.statistic)
    assert found.p_value == pytest.approx(expected.pvalue, abs=0.01)
    assert 0.001 < found.p_value < 0.8
    assert paired_difference(ANSWERS, ANSWERS, groups).p_value == 1


def test_no_difference_is_found_in_one_test_of_twenty(monkeypatch):
    """Of 400 pairs of models with equal answers in the mean, about 5 % have p below 0.05, and 5 % miss 0."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 400)
    rng = np.random.default_rng(2)
    found = [paired_difference(*rng.binomial(1, 0.7, (2, 200)).astype(float), seed=i) for i in range(400)]
    assert 0.02 < np.mean([one.p_value < 0.05 for one in found]) < 0.08
    assert 0.02 < np.mean([not one.low <= 0 <= one.high for one in found]) < 0.09


def test_a_file_of_items(tmp_path):
    weights = {"model": np.array([2.0, 1.0]), "random_weights": np.array([3.0, 1.0])}
    tests = {"pairs": scores(ANSWERS, OTHERS, tuple(GROUPS)), "words": scores([1.0, 0.5], weights=weights)}
    path = epath.Path(tmp_path / "a.items.jsonl")
    path.write_bytes(item_scores.to_json_lines(tests))
    found = item_scores.read_json_lines(path, "remove it")
    for name, one in tests.items():
        assert found[name][:2] == one[:2]
        for column, values in one.scores.items():
            np.testing.assert_array_equal(found[name].scores[column], values)
    assert found["pairs"].weights is None
    np.testing.assert_equal(found["words"].weights, weights)


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
        line_of(more=', "weights": {"model": null}').encode(),
        line_of(more=', "weights": {}').encode(),
    ],
)
def test_a_damaged_file_of_items(tmp_path, damage):
    path = epath.Path(tmp_path / "a.items.jsonl")
    path.write_bytes(damage)
    with pytest.raises(UserError, match=r"a.items.jsonl, line 1.*remove it"):
        item_scores.read_json_lines(path, "remove it")


@pytest.mark.parametrize(
    "second",
    [
        line_of(more=', "group": "g"'),
        line_of('{"model": 1, "lone_mask": 0}'),
        line_of(more=', "weights": {"model": 1}'),
    ],
)
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


RIGHT, WORDS = RNG.binomial(9, 0.6, 40).astype(float), RNG.integers(9, 20, 40).astype(float)
OTHER_RIGHT, OTHER_WORDS = np.minimum(RIGHT + RNG.integers(0, 6, 40), WORDS), WORDS + RNG.integers(0, 14, 40)


def test_ratios_of_sums_are_resampled_by_items():
    """Right words over words, sentences drawn, against plain loops; not the mean of the sentences' shares."""
    scores, weights = np.stack([RIGHT, OTHER_RIGHT]), np.stack([WORDS, OTHER_WORDS])
    rng, ratio = np.random.default_rng(3), lambda right, words: right.sum() / words.sum()
    drawn = [rng.integers(40, size=40) for _ in range(20_000)]
    resampled = np.array([[ratio(x[i], w[i]) for x, w in zip(scores, weights, strict=True)] for i in drawn])
    found = bootstrap.compare_columns(scores, weights)
    for mean, column, right, words in zip(found.means, resampled.T, scores, weights, strict=True):
        assert mean.value == pytest.approx(ratio(right, words)) != pytest.approx((right / words).mean(), abs=1e-4)
        np.testing.assert_allclose(mean[1:], np.quantile(column, [0.025, 0.975]), atol=0.004)
    (difference,) = found.differences
    assert difference.difference == pytest.approx(ratio(RIGHT, WORDS) - ratio(OTHER_RIGHT, OTHER_WORDS))
    ends = np.quantile(resampled[:, 0] - resampled[:, 1], [0.025, 0.975])
    np.testing.assert_allclose(difference[1:3], ends, atol=0.002)

    swapped = []
    for kept in rng.random((20_000, 40)) < 0.5:
        sides = [np.where(kept, *pair) for of in (scores, weights) for pair in (of, of[::-1])]
        swapped.append(ratio(sides[0], sides[2]) - ratio(sides[1], sides[3]))
    expected = np.mean(np.abs(swapped) >= abs(difference.difference) - 1e-12)
    assert difference.p_value == pytest.approx(expected, abs=0.01)
    of_columns = bootstrap.bootstrap_mean(scores, None, weights)
    np.testing.assert_allclose(np.stack(of_columns, -1), found.means)


def test_a_candidate_is_chosen_on_other_items():
    """Of 200 candidates without any difference the best one seems better than 0.5; cross-fitted it does not."""
    scores, weights = np.random.default_rng(4).binomial(4, 0.5, (200, 400)).astype(float), np.full(400, 4.0)
    found = bootstrap.cross_fit(scores, weights)
    halves = scores[:, 1::2].sum(1).argmax(), scores[:, ::2].sum(1).argmax()
    assert found.chosen == halves
    np.testing.assert_array_equal(found.scores[::2], scores[halves[0], ::2])
    np.testing.assert_array_equal(found.scores[1::2], scores[halves[1], 1::2])
    assert abs(found.scores.sum() / found.weights.sum() - 0.5) < 0.025 < scores.sum(1).max() / 1600 - 0.5


def test_items_that_one_model_lacks_are_left_out():
    ours, theirs = scores([1.0, 1.0, 0.0, 1.0]), scores([0.0, 0.0, 1.0])
    theirs = theirs._replace(items=("a.jsonl, line 3", "a.jsonl, line 0", "x"))
    (row,) = comparison.compare("cloze", {"t": ours, "alone": ours}, {"t": theirs})
    assert (row["items"], row["only_model"], row["only_other"]) == (2, 2, 1)
    assert (row["model"]["value"], row["other"]["value"], row["difference"]["difference"]) == (1, 0, 1)
    with pytest.raises(UserError, match="no item of t in common"):
        comparison.compare("cloze", {"t": ours}, {"t": theirs.select(["x"])})
    rows = comparison.adjust([{**row, "difference": {**row["difference"], "p_value": p}} for p in (0.03, 0.01, 0.02)])
    assert [one["adjusted_p_value"] for one in rows] == pytest.approx([0.04, 0.03, 0.04])


MODELS: list[str] = []


def run_with_items(inputs, settings, **about):
    """The first model answers as ANSWERS, the second one as OTHERS."""
    digest = result_files.model_sha256(inputs.model)
    MODELS.extend([digest] if digest not in MODELS else [])
    return {
        "total": 0.0,
        "texts": 1,
        "words": 3,
        ITEMS: {"test": scores((ANSWERS, OTHERS)[MODELS.index(digest)], **about)},
    }


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
    expected = paired_difference(ANSWERS, OTHERS)
    assert row["difference"] == expected._asdict() and row["adjusted_p_value"] == expected.p_value
    page, printed = (tmp_path / "out" / "report.html").read_text(), capsys.readouterr().out
    assert "two models compared" in page and str(first) in page
    assert f"words: test (%), 60 items: {100 * ANSWERS.mean():.1f} (" in printed
    assert f"against {100 * OTHERS.mean():.1f} (" in printed
    assert "random weights" in page  # the table of intervals beside baselines
    items = tmp_path / "out" / "words.items.jsonl"
    items.write_text(items.read_text().split("\n", 1)[1])
    assert call(tiny_run, *flags) == 2
    assert "words.items.jsonl has other items than" in capsys.readouterr().err
    items.unlink()
    assert call(tiny_run, *flags) == 2
    assert "words.items.jsonl is missing: remove" in capsys.readouterr().err


def test_models_with_different_tokenizers(tiny_run, tmp_path, call, capsys, monkeypatch):
    """Tests by tokens are left out and named; if no other one remains, the second model runs nothing."""
    first = min((tiny_run / "checkpoints").iterdir())
    load = loaded_model.load

    def load_other(source):
        model = load(source)
        if str(source) == str(first):
            model.tokenizer = SimpleNamespace(fingerprint="another")
        return model

    monkeypatch.setattr(loaded_model, "load", load_other)

    def run(*one, also=()):
        result = run_with_items(*one)
        (test,) = result[ITEMS].values()
        return result | {ITEMS: {"facts": test._replace(same_tokenizer=True)} | dict.fromkeys(also, test)}

    monkeypatch.setattr(analyse, "SUITES", (SUITE._replace(run=run),))
    assert call(tiny_run, "--data", tmp_path / "data", "--compare", first) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "--compare: the tokenizers differ, and items are tokens, or their candidates, in facts of words" in error
    assert len(MODELS) == 1
    for path in (tmp_path / "out").glob("words*"):
        path.unlink()
    monkeypatch.setattr(analyse, "SUITES", (SUITE._replace(run=partial(run, also=["pairs"])),))
    assert call(tiny_run, "--data", tmp_path / "data", "--compare", first) == 0
    assert "tests by tokens are not compared: facts of words\n" in capsys.readouterr().err
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())["tests"]
    assert [row["test"] for row in rows] == ["pairs"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--compare", "RUN"), "has the weights of"),
        (("--compare", "FIRST", "--checkpoints", "all"), "--compare needs --data, and takes the newest checkpoint"),
        (("--compare", "FIRST", "--suites", "uncounted"), "none of the suites that ran counts items"),
        (("--compare", "nowhere"), "nowhere"),
        (("--compare", "EMPTY"), "empty"),
    ],
)
def test_wrong_comparisons(tiny_run, tmp_path, call, capsys, flags, message):
    (tmp_path / "empty").mkdir()
    paths = {"RUN": tiny_run, "FIRST": min((tiny_run / "checkpoints").iterdir()), "EMPTY": tmp_path / "empty"}
    assert call(tiny_run, "--data", tmp_path / "data", *(paths.get(flag, flag) for flag in flags)) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out" / "comparison.json").exists()
    assert not MODELS  # found before a suite runs
