"""Masking against a sequential reference, and its properties. test_masking_statistics.py has the statistics."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config import ObjectiveConfig
from bert_jax.model.dropout import hash_combine
from bert_jax.objectives.mask_groups import group_length_probabilities
from bert_jax.objectives.masking import (
    GROUP_LENGTH,
    RANDOM_TOKEN,
    REPLACE,
    SELECT,
    mask_tokens,
    prediction_counts_by_length,
    predictions_per_row,
)
from tests.jaxprs import primitives
from tests.objectives.masking_batches import (
    CLS,
    KEY,
    MASK,
    OBJECTIVE,
    ORDINARY,
    SEP,
    UNK,
    VOCABULARY,
    make_batch,
    masked,
    pack_rows,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

UNITS = ("token", "word", "ngram", "span")
CONTINUES = np.zeros(64, bool)
CONTINUES[ORDINARY[ORDINARY >= 40]] = True
PIECES = VOCABULARY._replace(continues_word=CONTINUES.tobytes())
"""Ids from 40 on continue a word."""


def predictions(before: dict, after: dict, row: int, slot: int) -> dict[int, tuple[int, int]]:
    """Offset in the example -> (label, replaced id), for one example."""
    by_offset = {}
    for position, label, weight in zip(
        after["target_positions"][row], after["target_labels"][row], after["target_weights"][row], strict=True
    ):
        if weight and before["segment_ids"][row, position] == slot + 1:
            offset = int(before["position_ids"][row, position])
            assert offset not in by_offset
            by_offset[offset] = int(label), int(after["input_ids"][row, position])
    return by_offset


def masks_of(packs, objective, slots=4, counts=None) -> list[dict]:
    """Per row of 48 tokens: example id -> its predictions. With fixed `slots`, one compiled program serves all."""
    before = pack_rows(packs, 48, 3, slots)
    after = jax.tree.map(np.asarray, masked(before, KEY, objective, PIECES, counts=counts))
    before = jax.tree.map(np.asarray, before)
    masks = [{e: predictions(before, after, row, k) for k, (e, _) in enumerate(pack)} for row, pack in enumerate(packs)]
    pairs = [pair for mask in masks for each in mask.values() for pair in each.values()]
    assert len(pairs) == after["target_weights"].sum()
    assert sum(label != replaced for label, replaced in pairs) == (after["input_ids"] != before["input_ids"]).sum()
    return masks


# The reference: one example at a time, one word at a time.


@functools.partial(jax.jit, static_argnums=1)
def hashes(example, length):
    position_key = hash_combine(KEY, 3, example, jnp.arange(length))
    return jnp.stack([hash_combine(position_key, stream) for stream in (SELECT, REPLACE, RANDOM_TOKEN, GROUP_LENGTH)])


def words_of(tokens, continues=CONTINUES) -> list[list[list[int]]]:
    """Runs of words of offsets."""
    runs, open_run = [], False
    for offset, token in enumerate(tokens):
        if token in VOCABULARY.special_ids:
            open_run = False
        elif not open_run:
            runs.append([[offset]])
            open_run = True
        elif continues[token]:
            runs[-1][-1].append(offset)
        else:
            runs[-1].append([offset])
    return runs


def groups_of(runs, objective, length_bits) -> list[list[list[int]]]:
    """Groups of words of offsets."""
    groups = []
    for run in runs:
        while run:
            size = 1
            if objective.mask_unit in ("ngram", "span"):
                cumulative = np.cumsum(group_length_probabilities(objective))
                size += sum(int(length_bits[run[0][0]]) >= round(bound * 2**32) for bound in cumulative[:-1])
            groups.append(run[:size])
            run = run[size:]
    return groups


def reference(example: int, tokens, objective: ObjectiveConfig) -> dict[int, tuple[int, int]]:
    """Offset -> (label, replaced id)."""
    select, replacing, draw, length_bits = np.asarray(hashes(example, 64))
    runs = words_of(tokens, np.zeros(64, bool) if objective.mask_unit == "token" else CONTINUES)
    groups = groups_of(runs, objective, length_bits)
    groups.sort(key=lambda group: (select[group[0][0]], group[0][0]))
    budget = max(1, round(objective.mask_rate * len(tokens)))
    mask = {}
    for group in groups:
        for word in group:
            if len(word) > budget:
                continue
            budget -= len(word)
            for offset in word:
                kind = replacing[group[0][0] if objective.mask_unit == "span" else offset] / 2**32
                replaced = tokens[offset]
                if kind < objective.mask_token_share:
                    replaced = MASK
                elif kind < objective.mask_token_share + objective.random_token_share:
                    replaced = ORDINARY[draw[offset] % len(ORDINARY)]
                mask[offset] = int(tokens[offset]), int(replaced)
    return mask


def text(seed: int, length: int) -> np.ndarray:
    """An example with words of one to about five tokens, and 3 % [UNK]."""
    rng = np.random.default_rng(seed)
    tokens = rng.choice(ORDINARY, length)
    tokens[rng.random(length) < 0.03] = UNK
    tokens[0], tokens[length // 2], tokens[-1] = CLS, SEP, SEP
    return tokens


ODD = {
    900: [CLS, 1, *[45] * 20, SEP],  # one giant word
    901: [CLS, *[1, 50, 51, 52, 53, 54] * 3, SEP],  # each longer than the budget of most rates
    902: [CLS, 45, SEP],  # a continuation starts a word after a special token
    903: [CLS, SEP, UNK, SEP, MASK, SEP],
    904: [CLS, 41, 42, UNK, 43, 1, SEP, 44, 2, 3, SEP],
    905: [1, 2, 43, 3],  # no special token at either end
    906: [44, 1, 2, 3, 45],
    907: list(range(1, 7)) * 6,
}
TEXTS = {i: text(i, n) for i, n in enumerate((48, 47, 40, 33, 24, 20, 16, 12, 9, 8, 7, 5, 4, 3))} | ODD
ALONE = [[(i, tokens)] for i, tokens in TEXTS.items()]
PACKED = [
    [(5, TEXTS[5]), (905, ODD[905]), (906, ODD[906]), (6, TEXTS[6])],
    [(13, TEXTS[13]), (903, ODD[903]), (904, ODD[904]), (900, ODD[900])],
    [(907, ODD[907]), (902, ODD[902])],
    [(901, ODD[901]), (4, TEXTS[4])],
    [],
]


@pytest.mark.parametrize("rate", [0.02, 0.6])
@pytest.mark.parametrize("unit", UNITS)
def test_equals_the_sequential_rule(unit, rate):
    """Of every example alone, and packed."""
    objective = ObjectiveConfig(mask_rate=rate, mask_unit=unit, mask_token_share=0.5, random_token_share=0.3)
    check_reference(objective)


def check_reference(objective: ObjectiveConfig) -> dict:
    expected = {i: reference(i, tokens, objective) for i, tokens in TEXTS.items()}
    for pack, masks in zip(ALONE + PACKED, masks_of(ALONE + PACKED, objective), strict=True):
        assert masks == {example: expected[example] for example, _ in pack}
    return expected


def test_odd_examples():
    """Their masks, stated explicitly."""
    expected = check_reference(ObjectiveConfig(mask_unit="word"))
    assert not expected[900] and not expected[901] and not expected[903]
    assert list(expected[902]) == [1] and len(expected[904]) == 2
    assert len(reference(901, ODD[901], ObjectiveConfig(mask_unit="word", mask_rate=0.3))) == 6


def test_extreme_lengths_of_groups():
    """Longer than the defaults; and spans that always end at once, so that each word is a span."""
    check_reference(ObjectiveConfig(mask_unit="ngram", max_ngram=64, mask_rate=0.3))
    short = check_reference(ObjectiveConfig(mask_unit="span", span_rate=1.0))
    single = {i: reference(i, tokens, ObjectiveConfig(mask_unit="word")) for i, tokens in TEXTS.items()}
    assert {i: set(mask) for i, mask in short.items()} == {i: set(mask) for i, mask in single.items()}


def test_whole_words_need_continues_word():
    batch = pack_rows([[(1, TEXTS[1])]], 48)
    with pytest.raises(AssertionError, match=r"continues_word, one byte for each of 64 ids: it has 0"):
        mask_tokens(batch, KEY, ObjectiveConfig(mask_unit="word"), VOCABULARY)


# Properties of any example.

tokens_strategy = st.lists(st.sampled_from([1, 2, 45, 46, 45, 46, SEP, UNK]), min_size=1, max_size=14)


@pytest.mark.parametrize("unit", UNITS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    bodies=st.lists(tokens_strategy, min_size=3, max_size=3), rate=st.sampled_from([0.15, 0.5]), first=st.integers(0)
)
def test_properties(unit, bodies, rate, first):
    objective = ObjectiveConfig(mask_rate=rate, mask_unit=unit)
    examples = [((first + i) % 2**31, [CLS, *body, SEP]) for i, body in enumerate(bodies)]
    last, *others = examples
    *separate, packed, _, mixed = masks_of(
        [[example] for example in examples] + [others, [], [last, *others]], objective
    )
    alone = {example: mask for masks in separate for example, mask in masks.items()}
    assert mixed == alone and packed == {example: alone[example] for example, _ in others}
    for example, tokens in examples:
        budget = max(1, round(rate * len(tokens)))
        chosen = set(alone[example])
        words = [word for run in words_of(tokens) for word in run]
        ordinary = set(itertools.chain(*words))
        assert chosen <= ordinary and len(chosen) <= budget
        assert all(label == tokens[offset] for offset, (label, _) in alone[example].items())
        if unit == "token":
            assert len(chosen) == min(budget, len(ordinary))
        else:
            assert all(chosen.isdisjoint(word) or chosen.issuperset(word) for word in words)
            left = budget - len(chosen)
            assert all(len(word) > left for word in words if chosen.isdisjoint(word))


# Counts and sizes.


@pytest.mark.parametrize("rate", [0.01, 0.15, 0.8])
def test_predictions_per_row_is_the_largest_sum(rate):
    def partitions(room, slots, shortest=3):
        yield 0
        if slots:
            for n in range(shortest, room + 1):
                for rest in partitions(room - n, slots - 1, n):
                    yield max(1, round(rate * n)) + rest

    for seq_len, slots in itertools.product((8, 17, 26), (1, 2, 3, 8, 64)):
        assert predictions_per_row(rate, seq_len, slots) == max(partitions(seq_len, slots))


@pytest.mark.parametrize("rate", [0.15, 0.25, 1 / 3, 0.3 + (0.15 - 0.3) * 3 / 7])
def test_counts_by_length(rate):
    """Of the rounded product, where ties go to the even number."""
    assert prediction_counts_by_length(rate, 8192).tolist() == [0, *(max(1, round(rate * n)) for n in range(1, 8193))]


@pytest.mark.parametrize("unit", UNITS)
def test_a_rate_that_is_an_input(unit):
    """The masks of the constant rate; of single tokens, a lower rate chooses a subset."""
    packs = [[(i, text(i, n))] for i, n in enumerate(range(1, 49))] + PACKED
    highest, masks = ObjectiveConfig(mask_rate=0.5, mask_unit=unit), []
    for rate in (0.5, 0.15):
        counts = jnp.asarray(prediction_counts_by_length(rate, 48))
        masks.append(masks_of(packs, highest, counts=counts))
        assert masks[-1] == masks_of(packs, replace(highest, mask_rate=rate))
    higher, lower = masks
    assert lower != higher
    if unit == "token":
        pairs = zip(lower, higher, strict=True)
        assert all(low[example].items() <= high[example].items() for low, high in pairs for example in low)


def test_predictions_of_one_example_per_row():
    for seq_len in (8, 128, 512):
        assert predictions_per_row(0.15, seq_len, 1) == prediction_counts_by_length(0.15, seq_len)[-1]
    assert predictions_per_row(0.15, 512, 8) > 77
    assert prediction_counts_by_length(0.15, 512, 80)[-1] == 77 and prediction_counts_by_length(0.15, 128, 19)[-1] == 19
    assert predictions_per_row(0.15, 128, 1, 15) == 15 and predictions_per_row(0.15, 128, 2, 6) == 12


def test_max_predictions():
    """Google's max_predictions_per_seq: a subset of the unbounded choice; the maximum applies to each example."""
    batch = make_batch([[(0, 40), (1, 20)], [(2, 60)]], 64)
    mask = jax.jit(mask_tokens, static_argnums=(2, 3, 4))
    free, bounded = (mask(batch, KEY, OBJECTIVE, VOCABULARY, most) for most in (None, 4))
    assert np.asarray(free["target_weights"]).sum(1).tolist() == [9, 9]  # 6 + 3, and 9
    assert np.asarray(bounded["target_weights"]).sum(1).tolist() == [7, 4]  # 4 + 3, and 4
    assert bounded["target_positions"].shape == (2, 8)
    for row in range(2):
        chosen = [
            {int(p) for p, w in zip(x["target_positions"][row], x["target_weights"][row], strict=True) if w}
            for x in (bounded, free)
        ]
        assert chosen[0] < chosen[1]


# What masks depend on.


def test_other_epochs_seeds_and_examples_get_other_masks():
    base = make_batch([[(i, 48)] for i in range(8)], 48, epoch=0)
    later = base | {"mask_epoch": jnp.ones(8, jnp.int32)}
    renamed = base | {"example_id": base["example_id"] + 100}

    def chosen(batch, key, unit):
        return np.asarray(masked(batch, key, replace(OBJECTIVE, mask_unit=unit), PIECES)["target_positions"])

    for unit in UNITS:
        first = chosen(base, KEY, unit)
        np.testing.assert_array_equal(first, chosen(base, KEY, unit))
        for other in (
            chosen(later, KEY, unit),
            chosen(renamed, KEY, unit),
            chosen(base, hash_combine(jnp.uint32(1), 1), unit),
        ):
            assert (first != other).any(axis=1).all()


@pytest.mark.parametrize("unit", ["token", "span"])
def test_in_shard_map_and_without_needless_loops(unit):
    """Inside shard_map, loop carries must have the same varying axes as the values."""
    batch, objective = pack_rows(ALONE[:4], 48), ObjectiveConfig(mask_unit=unit)
    mask = functools.partial(mask_tokens, objective=objective, vocabulary=PIECES)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, every = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    sharded = jax.jit(jax.shard_map(mask, mesh=mesh, in_specs=(rows, every), out_specs=rows))(batch, KEY)
    jax.tree.map(np.testing.assert_array_equal, sharded, masked(batch, KEY, objective, PIECES))
    parts = primitives(mask, batch, KEY)
    assert parts["while"] == (unit != "token")
    # With scatters of indices outside of rows, XLA's deterministic operations chose other tokens
    # (docs/log/model.md, 2026-11-26, H200). Those of `scatter_max` are inside.
    assert parts["scatter"] == 0
