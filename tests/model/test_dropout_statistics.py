"""Strong statistics of dropout's bits, which mix two words: those of one row of a mask have the second words in common.

A mix is weak first at rectangles: four elements whose words are (a, b), (a, d), (c, b), (c, d). The tests sum over all
1e11 rectangles of a plane of 1024 x 1024 elements. They pass for the mix of `dropout_bits`, and fail for weaker
ones. Planes in a chain differ in one coordinate from the one before. Seeds are fixed, so the tests are deterministic.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.array_types import Array
from bert_jax.model.dropout import DropoutKey, dropout_bits, dropout_threshold, dropout_words, hash_combine

pytestmark = pytest.mark.usefixtures("quick_compilation")
SIZE, HEADS = 1024, 4
PAIRS = SIZE * (SIZE - 1) // 2
RATES = (0.1, 0.5)
COORDINATES = ("head", "row", "site", "layer", "step", "seed")
ALPHA = 1e-4
Mix = Callable[[Array, Array], Array]


def chain(planes: int) -> Iterator[tuple[str, Array, Array]]:
    """The coordinate that differs from the plane before, and the words of a plane, [SIZE, 1] and [1, SIZE]."""
    place = dict.fromkeys(COORDINATES, 0)
    for i in range(planes):
        changed = COORDINATES[i % len(COORDINATES)]
        place[changed] = (place[changed] + 1) % HEADS if changed == "head" else place[changed] + 1
        key = hash_combine(jnp.uint32(place["seed"]), 0x0D0, place["step"])
        dropout_key = DropoutKey(key, jnp.array([place["row"]])).fold_in(place["layer"]).fold_in(place["site"])
        first, second = dropout_words(dropout_key, (1, HEADS, SIZE, SIZE))
        yield changed, first[0, place["head"]], second[0, 0]


def rectangles(x: np.ndarray, y: np.ndarray, rate: float) -> np.ndarray:
    """For each row of x and each of y, the sum over pairs of columns of the products of the four corners."""
    products = x @ y.T
    # A square of a standardised 0 or 1 is linear in it, so that the sum of products of squares needs no second product.
    slope = (1 - 2 * rate) / np.sqrt(rate * (1 - rate))
    squares = SIZE + slope * (x.sum(1)[:, None] + y.sum(1)[None]) + slope**2 * products
    return (np.square(products) - squares) / 2


def windows(dropped: np.ndarray, distance: int) -> np.ndarray:
    """How often each of the 16 patterns of 2 x 2 elements at a distance occurs, in windows that do not overlap."""
    blocks = dropped.reshape(SIZE // (2 * distance), 2, distance, SIZE // (2 * distance), 2, distance)
    pattern = sum(2**i * blocks[:, i // 2, :, :, i % 2, :].astype(np.uint8) for i in range(4))
    return np.bincount(pattern.ravel(), minlength=16)


def measure(mix: Mix, planes: int) -> dict[str, float]:
    """Statistics of planes that are standard normal if all elements are independent and have the rate."""
    sums, variances, counts, largest = defaultdict(float), defaultdict(float), defaultdict(int), 0.0

    def add(name: str, values: np.ndarray, variance: float) -> None:
        sums[name] += values.sum(dtype=np.float64)
        variances[name] += variance

    before = {}
    for changed, first, second in chain(planes):
        bits = np.asarray(mix(first, second))
        for rate in RATES:
            dropped = bits < np.asarray(dropout_threshold(rate))
            x = ((dropped - rate) / np.sqrt(rate * (1 - rate))).astype(np.float32)
            add(f"rate {rate}", x, x.size)
            for down, right in ((1, 0), (0, 1), (1, 1), (8, 0), (0, 8)):
                shifted = x[: SIZE - down, : SIZE - right] * x[down:, right:]
                add(f"neighbours {down} {right}, {rate}", shifted, shifted.size)
            for axis in (0, 1):  # the sum of a row of n elements has a variance of n
                squares = np.square(x.sum(axis, dtype=np.float64)) / SIZE - 1
                add(f"sums over axis {axis}, {rate}", squares, 2 * SIZE)
            for distance in (1, SIZE // 2):
                counts[distance, rate] += windows(dropped, distance)
            within = rectangles(x, x, rate)
            np.fill_diagonal(within, 0)
            add(f"rectangles, {rate}", within / 2, PAIRS * PAIRS)
            if rate == 0.5:  # the products of rows are nearly normal
                products = [x @ x.T, x.T @ x]
                largest = max(largest, *(np.abs(p - np.diag(np.diag(p))).max() for p in products))
            if rate in before:
                add(f"same place, other {changed}, {rate}", x * before[rate], x.size)
                across = rectangles(x, before[rate], rate)
                add(f"rectangles, other {changed}, {rate}", across, SIZE * SIZE * PAIRS)
            before[rate] = x
    scores = {name: sums[name] / variances[name] ** 0.5 for name in sums}
    for (distance, rate), found in counts.items():
        dropped_of = np.array([bin(pattern).count("1") for pattern in range(16)])
        expected = found.sum() * rate**dropped_of * (1 - rate) ** (4 - dropped_of)
        chi_square = (np.square(found - expected) / expected).sum()
        scores[f"patterns at {distance}, {rate}"] = stats.norm.isf(max(stats.chi2.sf(chi_square, 15), 1e-300))
    chance = (
        stats.norm.sf(largest / SIZE**0.5) * 4 * PAIRS * planes
    )  # of the largest of all products of rows or columns
    return scores | {"largest": stats.norm.isf(np.clip(chance, 1e-300, 0.5))}


def weakness(mix: Mix, planes: int) -> tuple[float, str]:
    """The largest statistic, as a multiple of the bound that chance exceeds with probability ALPHA, and its name."""
    scores = measure(mix, planes)
    bound = stats.norm.isf(ALPHA / len(scores) / 2)
    name = max(scores, key=lambda name: abs(scores[name]))
    return abs(scores[name]) / bound, name


def test_bits_are_independent():
    assert weakness(dropout_bits, 7)[0] < 1, weakness(dropout_bits, 7)


@pytest.mark.slow
def test_bits_are_independent_in_1e8_draws():
    assert weakness(dropout_bits, 100)[0] < 1, weakness(dropout_bits, 100)


FACTOR = jnp.uint32(0x9E3779B1)
WEAK: dict[str, Mix] = {
    "no multiplication": lambda a, b: a ^ b,
    "one multiplication": lambda a, b: (a ^ b) * FACTOR,
    "one multiplication of a sum": lambda a, b: (a + b) * FACTOR,
    "one multiplication after a shift": lambda a, b: ((a ^ b) ^ ((a ^ b) >> 15)) * FACTOR,
    "two multiplications without a shift": lambda a, b: (a ^ b) * FACTOR * FACTOR,
    "the rate 0.8 % too high": lambda a, b: dropout_bits(a, b) - (dropout_bits(a, b) >> 7),
}


@pytest.mark.parametrize("name", WEAK)
def test_a_weak_mix_fails(name):
    score, statistic = weakness(WEAK[name], 2)
    print(f"{name}: {score:.1f} times the bound, {statistic}")
    assert score > 1, statistic
