"""Mixtures: exact shares over every interval that the docs state, and the syntax of --corpus."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data.mixture import (
    CYCLE_ROWS,
    CorpusWeight,
    MixtureOrder,
    open_corpora,
    parse_corpus_weight,
    resolve_shares,
    rows_per_cycle,
    smoothed_shares,
)
from bert_jax.errors import UserError
from tests.stores import memory_store

WEIGHTS = st.lists(st.floats(0.01, 1), min_size=1, max_size=9)


def test_shares_to_a_power():
    """q_i ~ p_i^0.7 (multilingual BERT), by hand: 0.6156, 0.4305, 0.2650, 0.1228 over their sum."""
    np.testing.assert_allclose(smoothed_shares([50, 30, 15, 5], 0.7), [0.4293, 0.3002, 0.1848, 0.0857], atol=5e-5)
    np.testing.assert_allclose(smoothed_shares([3, 1], 1), [0.75, 0.25])
    np.testing.assert_allclose(smoothed_shares([3, 1], 0), [0.5, 0.5])
    with pytest.raises(ValueError, match="positive"):
        smoothed_shares([1, 0], 1)


@settings(max_examples=200, deadline=None)
@given(WEIGHTS)
def test_every_cycle_has_the_rounded_shares(weights):
    wanted = np.array(weights) / sum(weights)
    counts = rows_per_cycle(wanted)
    assert counts.sum() == CYCLE_ROWS and (np.abs(counts - wanted * CYCLE_ROWS) < 1).all()
    order = MixtureOrder(wanted)
    for cycle in (0, 1, 12345):
        np.testing.assert_array_equal(
            np.bincount(order.corpus_of_rows(cycle * CYCLE_ROWS, CYCLE_ROWS), minlength=len(weights)), counts
        )


@settings(max_examples=200, deadline=None)
@given(WEIGHTS)
def test_any_interval_has_its_shares_within_the_bound(weights):
    """At most 1 + s (c - 2) rows off, wherever it begins (the largest difference of two prefixes), and half as much
    from the start on."""
    order = MixtureOrder(np.array(weights) / sum(weights))
    rows = order.corpus_of_rows(0, 2 * CYCLE_ROWS)
    assert (order.corpus_of_rows(777, CYCLE_ROWS) == rows[777 : 777 + CYCLE_ROWS]).all()
    for corpus, count in enumerate(order.counts):
        share = count / CYCLE_ROWS
        surplus = np.concatenate([[0], np.cumsum(rows == corpus)]) - share * np.arange(2 * CYCLE_ROWS + 1)
        bound = 1 + share * (len(weights) - 2) + 1e-9
        assert np.ptp(surplus) <= bound and np.abs(surplus).max() <= bound / 2


def test_a_share_that_no_cycle_can_give():
    with pytest.raises(UserError, match=r"a share of 4e-05 .* give it more weight, or leave it out"):
        MixtureOrder([0.99996, 0.00004])
    assert MixtureOrder([0.99994, 0.00006]).counts.tolist() == [9999, 1]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("books", CorpusWeight(Path("books"), None)),
        ("books=2", CorpusWeight(Path("books"), 2.0)),
        ("a/b=3e-1", CorpusWeight(Path("a/b"), 0.3)),
        ("lr=1=0.5", CorpusWeight(Path("lr=1"), 0.5)),
        ("weird=7", CorpusWeight(Path("weird=7"), None)),
        ("weird=7=2", CorpusWeight(Path("weird=7"), 2.0)),
    ],
)
def test_parse(tmp_path, monkeypatch, text, part):
    """A directory named `weird=7` exists."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weird=7").mkdir()
    assert parse_corpus_weight(text) == part


def test_parse_a_bucket():
    """pathlib would lose a slash."""
    (memory_store() / "date=3" / "corpus.json").write_text("{}")
    for text, directory, weight in (
        ("gs://a/b", "gs://a/b", None),  # existence is not checked
        ("az://bucket/b=2", "az://bucket/b", 2.0),
        ("az://bucket/date=3", "az://bucket/date=3", None),
    ):
        part = parse_corpus_weight(text)
        assert (str(part.directory), part.weight) == (directory, weight)


@pytest.mark.parametrize("weight", ["heavy", "0", "-1", "nan", "inf", "1e999", "", "1/2", "0,3"])
def test_weights_that_are_none(weight):
    with pytest.raises(
        UserError, match=r"--corpus books=.*: .*'.*' is not a weight: write a positive number"
    ) as caught:
        parse_corpus_weight(f"books={weight}")
    assert "\n" not in str(caught.value)


def test_resolve():
    one, two, bare = CorpusWeight(Path("a"), 3.0), CorpusWeight(Path("b"), 1.0), CorpusWeight(Path("c"), None)
    assert resolve_shares([one, two], [5, 5], 0.7) == pytest.approx([0.75, 0.25])
    other = dataclasses.replace(bare, directory=Path("d"))
    assert resolve_shares([bare, other], [900, 100], 1.0) == pytest.approx([0.9, 0.1])
    assert resolve_shares([bare, other], [900, 100], 0.7) == pytest.approx(smoothed_shares([900, 100], 0.7).tolist())
    assert resolve_shares(
        [CorpusWeight(Path("a"), 1e308), CorpusWeight(Path("b"), 1e308)], [1, 1], 1.0
    ) == pytest.approx([0.5, 0.5])
    with pytest.raises(UserError, match=r"--corpus c has no weight, .* \(--corpus c=1\), or none"):
        resolve_shares([one, bare, two], [5, 5, 5], 1.0)


def test_the_order_of_flags_decides_nothing(tiny_corpus, other_corpus, tmp_path):
    """And the same corpus twice, or two of one name, are refused. `other_corpus` is called "corpus", too."""
    copy = tmp_path / "copy"
    copy.symlink_to(tiny_corpus)
    with pytest.raises(UserError, match="are the same corpus: name it once"):
        open_corpora([CorpusWeight(tiny_corpus), CorpusWeight(copy)])
    with pytest.raises(UserError, match="are both named 'corpus', and metrics are named by corpus"):
        open_corpora([CorpusWeight(tiny_corpus), CorpusWeight(other_corpus)])
    with pytest.raises(UserError, match="no corpus is given: add --corpus DIR"):
        open_corpora([])
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    for file in other_corpus.iterdir():
        (renamed / file.name).symlink_to(file)
    (renamed / "corpus.json").unlink()
    manifest = (other_corpus / "corpus.json").read_text()
    assert '"name": "corpus"' in manifest
    (renamed / "corpus.json").write_text(manifest.replace('"name": "corpus"', '"name": "renamed"'))
    one, two = CorpusWeight(tiny_corpus, 1.0), CorpusWeight(renamed, 2.0)
    found, corpora = open_corpora([one, two])
    assert open_corpora([two, one])[0] == found
    assert [part.directory for part in found] == [corpus.directory for corpus in corpora]
    assert [corpus.identity for corpus in corpora] == sorted(corpus.identity for corpus in corpora)
