"""Statistics of a million masked tokens per unit, against exact expectations.

Seeds are fixed. With random seeds, each comparison would reject a correct program with probability ALPHA.
"""

import functools
import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.config import ObjectiveConfig
from bert_jax.model.dropout import hash_combine
from bert_jax.objectives.mask_groups import find_groups, find_words, group_length_probabilities
from bert_jax.objectives.masking import GROUP_LENGTH
from tests.objectives.masking_batches import CLS, KEY, MASK, ORDINARY, SEP, VOCABULARY, masked

pytestmark = pytest.mark.slow  # with all optimizations of XLA: it computes for longer than it compiles

ALPHA = 1e-4
UNITS = ("token", "word", "ngram", "span")
LENGTHS = {
    "token": np.ones(1),
    "word": np.ones(1),
    "ngram": np.array([6, 3, 2]) / 11,
    "span": 0.2 * 0.8 ** np.arange(10) / (1 - 0.8**10),
}
"""Chance of a group of 1, 2, ... words: 1/n; and geometric, cut at ten and scaled, 3.8 words on average."""
CONTINUES = np.zeros(64, bool)
CONTINUES[ORDINARY[ORDINARY >= 40]] = True
PIECES = VOCABULARY._replace(continues_word=CONTINUES.tobytes())
BEGINS, CONTINUATIONS = ORDINARY[ORDINARY < 40], ORDINARY[ORDINARY >= 40]


def plain_rows(tokens: np.ndarray, first: int) -> dict:
    """One example per row, ids counted from `first`, no padding."""
    rows, seq_len = tokens.shape
    return {
        "input_ids": jnp.asarray(tokens, jnp.int32),
        "segment_ids": jnp.ones((rows, seq_len), jnp.int32),
        "position_ids": jnp.broadcast_to(jnp.arange(seq_len, dtype=jnp.int32)[None], (rows, seq_len)),
        "example_id": first + jnp.arange(rows, dtype=jnp.int32)[:, None],
        "mask_epoch": jnp.zeros(rows, jnp.int32),
    }


@functools.partial(jax.jit, static_argnums=1)
def group_starts(batch, objective):
    """Position of the first token of each token's group, drawn as mask_tokens draws it."""
    ordinary = ~jnp.isin(batch["input_ids"], jnp.asarray(VOCABULARY.special_ids))
    words = find_words(batch["segment_ids"], ordinary, jnp.asarray(CONTINUES)[batch["input_ids"]])
    position_key = hash_combine(KEY, batch["mask_epoch"][:, None], batch["example_id"], batch["position_ids"])
    return find_groups(words, hash_combine(position_key, GROUP_LENGTH), group_length_probabilities(objective))


ROWS, WORDS, CHOSEN = 8192, 126, 19


@functools.lru_cache
def million(unit: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """8,192 rows of [CLS], 126 words of one token, [SEP], without the two: ids, replaced ids, chosen, group starts."""
    objective, parts = ObjectiveConfig(mask_unit=unit), []
    for first in range(0, ROWS, 1024):
        tokens = np.random.default_rng(first).choice(BEGINS, (1024, WORDS + 2))
        tokens[:, 0], tokens[:, -1] = CLS, SEP
        before = plain_rows(tokens, first)
        after = jax.tree.map(np.asarray, masked(before, KEY, objective, PIECES))
        assert (after["target_weights"] == 1).all() and after["target_weights"].shape == (1024, CHOSEN)
        chosen = np.zeros(tokens.shape, bool)
        np.put_along_axis(chosen, after["target_positions"], True, axis=1)
        inside = slice(1, -1)
        drawn = np.asarray(group_starts(before, objective))[:, inside] - 1
        parts.append((tokens[:, inside], after["input_ids"][:, inside], chosen[:, inside], drawn))
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


@pytest.mark.parametrize("unit", UNITS)
def test_shares_of_mask_random_and_kept(unit):
    """80 % [MASK], 10 % random, 10 % kept, of tokens, or of spans; a random draw of m tokens can hit all of them."""
    tokens, replaced, chosen, group_start = million(unit)
    decision = group_start if unit == "span" else np.broadcast_to(np.arange(WORDS), tokens.shape)
    decision = (decision + WORDS * np.arange(ROWS)[:, None])[chosen]
    size = np.bincount(decision)
    hidden = np.bincount(decision, (replaced == MASK)[chosen])
    same = np.bincount(decision, (replaced == tokens)[chosen])
    made = size > 0
    assert set(np.unique(hidden[made] / size[made])) == {0, 1}
    observed, expected, wrong = [], [], []
    for m in range(1, size.max() + 1):
        of_size = size == m
        n, masks, kept = of_size.sum(), (hidden[of_size] == m).sum(), (same[of_size] == m).sum()
        hit = len(ORDINARY) ** -float(m)
        observed.append([masks, kept, n - masks - kept])
        expected.append([0.8 * n, n * (0.1 + 0.1 * hit), n * 0.1 * (1 - hit)])
        wrong.append([0.77 * n, 0.115 * n, 0.115 * n])
    assert len(observed) == (10 if unit == "span" else 1)
    assert _chi_square(observed, expected) > ALPHA
    assert _chi_square(observed, wrong) < ALPHA


def _chi_square(observed, expected) -> float:
    """p-value of several histograms together, a row each, given the sums of rows."""
    observed, expected = np.asarray(observed, float), np.asarray(expected)
    np.testing.assert_allclose(observed.sum(1), expected.sum(1))
    square = np.square(observed - expected) / expected
    return stats.chi2.sf(square.sum(), observed.size - len(observed))


@pytest.mark.parametrize("unit", UNITS)
def test_random_tokens_are_uniform_over_ordinary_ids(unit):
    """Drawn per token, in spans too; not counted where they hit the original, which is one of BEGINS."""
    tokens, replaced, chosen, _ = million(unit)
    drawn = replaced[chosen & (replaced != MASK) & (replaced != tokens)]
    counts = np.bincount(drawn, minlength=64)
    assert len(drawn) > 14_000 and not counts[list(VOCABULARY.special_ids)].any()
    keeps = np.where(ORDINARY < 40, 1 - 1 / len(BEGINS), 1.0)
    assert stats.chisquare(counts[ORDINARY], len(drawn) * keeps / keeps.sum()).pvalue > ALPHA
    keeps *= 1 + 0.1 * (-1.0) ** np.arange(len(keeps))
    assert stats.chisquare(counts[ORDINARY], len(drawn) * keeps / keeps.sum()).pvalue < ALPHA


def test_neighbours_are_chosen_independently():
    """Two adjacent words both as often as two draws of 19 from 126 say, within 5 deviations; in groups far more."""
    expected = ROWS * (WORDS - 1) * CHOSEN * (CHOSEN - 1) / (WORDS * (WORDS - 1))
    for unit in UNITS:
        chosen = million(unit)[2]
        excess = ((chosen[:, 1:] & chosen[:, :-1]).sum() - expected) / np.sqrt(expected)
        assert abs(excess) < 5 if unit in ("token", "word") else excess > 50


@pytest.mark.parametrize("unit", ["ngram", "span"])
def test_lengths_of_groups(unit):
    """Of two successive groups, over all pairs that the end of the example cannot cut: independent draws."""
    group_start, lengths = million(unit)[3], LENGTHS[unit]
    longest = len(lengths)
    pairs = np.zeros((longest, longest))
    for row in group_start:
        starts = np.unique(row)
        assert starts[0] == 0 and np.diff(starts).max() <= longest
        for start, middle, end in zip(starts[:-2:2], starts[1:-1:2], starts[2::2], strict=True):
            if start + 2 * longest < WORDS:
                pairs[middle - start - 1, end - middle - 1] += 1
    total = pairs.sum()
    assert total > 100_000
    assert stats.chisquare(pairs.ravel(), total * np.outer(lengths, lengths).ravel()).pvalue > ALPHA
    # The test has power: it rejects uniform lengths, and the mass of longer spans added to the longest.
    pile = 0.2 * 0.8 ** np.arange(10)
    pile[-1] += 1 - pile.sum()
    for wrong in (np.full(longest, 1 / longest), *([pile] if unit == "span" else [])):
        assert stats.chisquare(pairs.ravel(), total * np.outer(wrong, wrong).ravel()).pvalue < ALPHA


# The whole distribution of masks, of an example that is small enough to try all orders.

SIZES, BUDGET, COPIES = (1, 2, 1, 1, 3, 1, 2), 4, 81_920
OBJECTIVE = functools.partial(ObjectiveConfig, mask_rate=0.3)


def all_masks(lengths: np.ndarray, sizes: tuple[int, ...]) -> dict[frozenset[int], float]:
    """Chance of each set of chosen words: every way to cut the words into groups, every order of the groups."""
    chances: Counter = Counter()
    for cuts in itertools.product((False, True), repeat=len(sizes) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(sizes)]
        groups = [range(a, b) for a, b in itertools.pairwise(edges)]
        if max(map(len, groups)) > len(lengths):
            continue
        chance = math.prod(lengths[len(group) - 1] for group in groups[:-1]) * lengths[len(groups[-1]) - 1 :].sum()
        for order in itertools.permutations(groups):
            left, taken = BUDGET, []
            for word in itertools.chain(*order):
                if sizes[word] <= left:
                    left -= sizes[word]
                    taken.append(word)
            chances[frozenset(taken)] += chance / math.factorial(len(groups))
    return chances


@pytest.mark.parametrize("unit", UNITS)
def test_every_mask_has_its_chance(unit):
    """Of 1,064,960 tokens: [CLS], seven words of one to three tokens, [SEP], four tokens to predict."""
    tokens = [CLS, *itertools.chain(*([BEGINS[i], *CONTINUATIONS[: n - 1]] for i, n in enumerate(SIZES))), SEP]
    word = np.repeat(np.arange(len(SIZES)), SIZES)
    observed: Counter = Counter()
    for first in range(0, COPIES, COPIES // 4):
        rows = plain_rows(np.tile(tokens, (COPIES // 4, 1)), first)
        after = jax.tree.map(np.asarray, masked(rows, KEY, OBJECTIVE(mask_unit=unit), PIECES))
        assert after["target_weights"].shape == (len(after["input_ids"]), BUDGET)
        # Position 0 is the filling.
        observed.update(map(tuple, after["target_positions"]))
    if unit == "token":
        expected = dict.fromkeys(itertools.combinations(range(1, 12), BUDGET), 1 / math.comb(11, BUDGET))
        assert set(observed) == set(expected) and _histogram(observed, expected) > ALPHA
        return
    counts: Counter = Counter()
    for positions, times in observed.items():
        counts[frozenset(word[p - 1] for p in positions if p)] += times
    expected = all_masks(LENGTHS[unit], SIZES)
    assert set(counts) == set(expected) and _histogram(counts, expected) > ALPHA
    for other in {"word", "ngram", "span"} - {unit}:
        assert _histogram(counts, all_masks(LENGTHS[other], SIZES)) < ALPHA


def _histogram(observed: Counter, expected: dict) -> float:
    """p-value; every kind has at least ten expected."""
    total = sum(observed.values())
    pairs = np.array([(observed[kind], chance * total) for kind, chance in expected.items()])
    assert pairs[:, 1].min() > 10
    return stats.chisquare(*pairs.T).pvalue
