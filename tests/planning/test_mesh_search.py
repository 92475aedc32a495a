"""The search with a fake compiler: what it compiles, in which order, and the reasons of the other outcomes."""

import itertools

import pytest

from bert_jax.chips import Sizes
from bert_jax.errors import UserError
from bert_jax.planning import mesh_search as module
from bert_jax.planning.memory_model import estimate_memory
from bert_jax.planning.mesh_search import MARGIN, MAX_COMPILED, RETRY_FACTOR, Candidate, candidates, search_phase
from bert_jax.planning.roofline import predict
from tests.planning.machines import CHIP, chip_with, run

CONFIG = run(batch=64)


class Compiler:
    """Returns the bytes of every candidate by a function, and records the calls."""

    def __init__(self, needed_bytes):
        self.needed_bytes, self.compiled = needed_bytes, []

    def __call__(self, candidate: Candidate) -> int:
        self.compiled.append(candidate)
        return self.needed_bytes(candidate)


def memory(candidate: Candidate) -> int:
    return sum(estimate_memory(candidate.config(CONFIG), 0, candidate.sizes, candidate.accumulation).values())


def seconds(candidate: Candidate) -> float:
    return predict(candidate.config(CONFIG), 0, candidate.sizes, candidate.accumulation, CHIP).step_seconds


def refuse(candidate):
    raise UserError("needs 20.0 GiB of 15.8")


def test_candidates_cover_meshes_micro_batches_and_policies():
    found = list(candidates(CONFIG, 0, 8, 1))
    assert len(found) == len(set(found))
    sizes = {candidate.sizes for candidate in found}
    # Two heads: tensor is 1 or 2.
    assert sizes == {Sizes(8 // f // t, f, t) for t in (1, 2) for f in (1, 2, 4, 8) if f * t <= 8}
    assert {candidate.remat for candidate in found} == {"none", "dots", "full"}
    mesh = [c.accumulation for c in found if c.sizes == Sizes(2, 4, 1) and c.remat == "none"]
    assert mesh == [1, 2, 4, 8]


def test_slices_divide_the_data_axis():
    assert {c.sizes for c in candidates(CONFIG, 0, 8, 4)} == {
        Sizes(8, 1, 1, 4),
        Sizes(4, 2, 1, 4),
        Sizes(4, 1, 2, 4),
    }


def test_meshes_that_do_not_divide_are_not_candidates():
    """15 feed-forward units over 2 devices; 5 devices on the data axis over 2 slices."""
    odd = run(batch=64, intermediate_size=15)
    assert {c.sizes.tensor for c in candidates(odd, 0, 8, 1)} == {1}
    assert {c.sizes for c in candidates(run(batch=40), 0, 10, 2)} == {Sizes(10, 1, 1, 2)}


def test_the_fastest_that_fits_is_chosen_after_one_compilation():
    compiler = Compiler(memory)
    result = search_phase(CONFIG, 0, 8, 1, CHIP, compiler)
    every = list(candidates(CONFIG, 0, 8, 1))
    assert len(compiler.compiled) == 1 and len(result.rated) == len(every)
    assert result.chosen.candidate == compiler.compiled[0]
    assert result.chosen.step_seconds == min(map(seconds, every))
    assert result.chosen.compiled == memory(result.chosen.candidate)
    times = [one.step_seconds for one in result.rated]
    assert times == sorted(times)
    assert {one.outcome for one in result.rated} == {"chosen", "slower"}
    assert all("than the chosen candidate" in one.reason for one in result.rated if one.outcome == "slower")


def test_too_large_candidates_are_not_compiled():
    every = list(candidates(CONFIG, 0, 8, 1))
    limit = sorted(map(memory, every))[len(every) // 4]
    compiler = Compiler(memory)
    result = search_phase(CONFIG, 0, 8, 1, chip_with(memory=limit), compiler)
    assert all(memory(candidate) <= limit * (1 + MARGIN) for candidate in compiler.compiled)
    too_large = [one for one in result.rated if one.outcome == "too large"]
    assert too_large and all("estimated" in one.reason and one.compiled is None for one in too_large)
    assert result.chosen.compiled <= limit


def test_at_most_six_are_compiled():
    compiler = Compiler(refuse)
    result = search_phase(CONFIG, 0, 8, 1, CHIP, compiler)
    assert len(compiler.compiled) == MAX_COMPILED == 6
    assert result.chosen is None
    outcomes = [one.outcome for one in result.rated]
    assert outcomes.count("did not fit") == 6
    assert all(one.reason == "needs 20.0 GiB of 15.8" for one in result.rated if one.outcome == "did not fit")
    assert all("6 others were compiled" in one.reason for one in result.rated if one.outcome == "not compiled")


def test_after_one_that_did_not_fit_smaller_ones_are_tried():
    compiler = Compiler(refuse)
    search_phase(CONFIG, 0, 8, 1, CHIP, compiler)
    sizes = [memory(candidate) for candidate in compiler.compiled]
    assert all(after <= before * RETRY_FACTOR for before, after in itertools.pairwise(sizes))


def test_a_program_larger_than_the_chip_does_not_fit_even_if_it_compiles():
    first = search_phase(CONFIG, 0, 8, 1, CHIP, Compiler(memory)).chosen.candidate
    compiler = Compiler(lambda c: int(CHIP.memory) + 1 if c == first else memory(c))
    result = search_phase(CONFIG, 0, 8, 1, CHIP, compiler)
    assert result.chosen.candidate != first and len(compiler.compiled) == 2
    assert result.rated[0].outcome == "did not fit" and "compiled: 0.9 GiB of 0.9" in result.rated[0].reason


def test_remat_only_where_memory_is_short(monkeypatch):
    """Remat costs time, so "none" is chosen if memory suffices; the policy of the config has no effect."""
    result = search_phase(run(batch=64, remat="full"), 0, 1, 1, CHIP, Compiler(lambda c: 0))
    assert result.chosen.candidate.remat == "none"
    # In micro-batches of one row, only full recomputation remains.
    small = min(map(memory, candidates(CONFIG, 0, 1, 1)))
    monkeypatch.setattr(module, "MARGIN", 0.0)
    result = search_phase(CONFIG, 0, 1, 1, chip_with(memory=small), Compiler(memory))
    assert result.chosen.candidate.remat == "full"


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(UserError, match="cannot be split over 8 device"):
        search_phase(run(batch=3), 0, 8, 1, CHIP, Compiler(memory))
