"""The search with a fake compiler: what it compiles, in which order, and the outcomes of the others."""

import dataclasses
import functools
import itertools

import pytest

from bert_jax.chips import Sizes
from bert_jax.errors import UserError
from bert_jax.planning import mesh_search
from bert_jax.planning.memory_model import estimate_memory
from bert_jax.planning.mesh_search import (
    CPU_SECONDS,
    MARGIN,
    MAX_TRIED,
    RETRY_FACTOR,
    MeshCandidate,
    choose,
    search_mesh,
)
from bert_jax.planning.roofline import ERROR, predict
from bert_jax.planning.topologies import Topology
from tests.planning.machines import CHIP, run

CONFIG = run(batch=64)
find_candidates = mesh_search.candidates


@functools.cache
def rated(config, phase, on_a_chip_without_memory):
    return list(find_candidates(config, phase, on_a_chip_without_memory))


@pytest.fixture(autouse=True)
def candidates_are_rated_once(monkeypatch):
    """Of each config and number of devices; the memory of the chip does not change them."""

    def find(config, phase, topology):
        chip = dataclasses.replace(topology.chip, memory=0.0)
        return rated(config, phase, dataclasses.replace(topology, chip=chip, devices=None))

    monkeypatch.setattr(mesh_search, "candidates", find)


def topology(count=8, slices=1, memory=CHIP.memory, is_compiled=True, hosts=1):
    chip = dataclasses.replace(CHIP, memory=memory)
    return Topology("round:8", chip, count, slices, hosts, () if is_compiled else None)


def candidates(config=CONFIG, **figures):
    return sorted(mesh_search.candidates(config, 0, topology(**figures)))


class Compiler:
    """Fake of `run_plan.plan_phase`: programs need the estimated bytes, times a factor by the number of the call, and
    some seconds."""

    def __init__(self, *factors: float, seconds: float = 0.0):
        self.factors, self.calls, self.tried = itertools.chain(factors, itertools.repeat(1.0)), [], []
        self.seconds, self.spent = seconds, 0.0

    def __call__(self, config, phase, topology, accumulation, only_estimate):
        self.spent += 0.0 if only_estimate else self.seconds
        self.calls.append((phase, config.mesh, config.model.remat, accumulation))
        sizes = Sizes(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, topology.slices)
        setting = config, phase, sizes, accumulation
        memory, seconds = sum(estimate_memory(*setting).values()), predict(*setting, topology.chip).step_seconds
        self.tried.append(MeshCandidate(seconds, memory, sizes, accumulation, config.model.remat))
        needed = memory * next(self.factors)
        fits = needed <= topology.chip.memory
        compiled = topology.devices is not None and not only_estimate
        return {"fits": fits, "memory": {"total": needed}, "accumulation": accumulation, "compiled": compiled}


def test_every_host_has_rows_of_its_own():
    """Of 8 devices, each of 4 hosts has two."""
    one_host, four_hosts = (
        {(one.sizes.data * one.sizes.fsdp, one.sizes.tensor) for one in candidates(wide, hosts=hosts)}
        for wide in [run(batch=8, num_heads=4)]
        for hosts in (1, 4)
    )
    assert four_hosts == {(8, 1), (4, 2)} and one_host == {*four_hosts, (2, 4)}


def test_candidates_cover_meshes_micro_batches_and_policies():
    found = candidates()
    # Two heads: tensor is 1 or 2.
    assert {one.sizes for one in found} == {
        Sizes(8 // f // t, f, t) for t in (1, 2) for f in (1, 2, 4, 8) if f * t <= 8
    }
    assert {one.remat for one in found} == {"none", "dots", "full"}
    mesh = [one.accumulation for one in found if one.sizes == Sizes(2, 4, 1) and one.remat == "none"]
    assert sorted(mesh) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("config", "count", "slices", "expected"),
    [
        (CONFIG, 8, 4, {Sizes(8, 1, 1, 4), Sizes(4, 2, 1, 4), Sizes(4, 1, 2, 4)}),
        (run(batch=64, intermediate_size=15), 2, 1, {Sizes(2, 1, 1), Sizes(1, 2, 1)}),
        (run(batch=40), 10, 2, {Sizes(10, 1, 1, 2)}),
    ],
)
def test_sizes_divide_slices_feed_forward_units_and_devices(config, count, slices, expected):
    assert {one.sizes for one in candidates(config, count=count, slices=slices)} == expected


SIMPLE = MeshCandidate(1.0, 100, Sizes(8), 1, "none")
FSDP, TENSOR = (SIMPLE._replace(sizes=Sizes(4, *axes)) for axes in ((2, 1), (1, 2)))


@pytest.mark.parametrize(
    ("simple", "fast"),
    [
        (SIMPLE, FSDP),
        (SIMPLE._replace(remat="full", accumulation=4), FSDP),
        (FSDP, TENSOR),
        (TENSOR, SIMPLE._replace(sizes=Sizes(2, 2, 2))),
        (SIMPLE, SIMPLE._replace(remat="dots")),
        (SIMPLE._replace(remat="dots"), SIMPLE._replace(remat="full")),
        (SIMPLE._replace(accumulation=4), SIMPLE._replace(remat="dots")),
        (SIMPLE, SIMPLE._replace(accumulation=2)),
        (TENSOR._replace(remat="full"), SIMPLE._replace(memory=900)),
    ],
)
def test_a_gain_below_the_error_of_predictions_is_not_worth_complexity(simple, fast):
    """The last one needs so much memory that the error of its estimate decides whether it fits."""
    for gain in (ERROR - 0.01, ERROR + 0.01):
        faster = fast._replace(step_seconds=simple.step_seconds / (1 + gain))
        chosen = choose(CONFIG, topology(memory=1000), [sorted([simple, faster])], [1000])
        assert chosen == [simple if gain < ERROR else faster]


def test_of_the_same_complexity_the_fastest_is_chosen():
    slower = SIMPLE._replace(step_seconds=1.1, memory=50)
    assert choose(CONFIG, topology(), [[SIMPLE, slower]], [1000]) == [SIMPLE]


def test_the_mesh_is_that_of_the_longest_phase_and_fits_in_all():
    config = dataclasses.replace(CONFIG, phases=(CONFIG.phases[0], run(batch=64, seq_len=64).phases[0]))
    rated = [[SIMPLE, FSDP._replace(step_seconds=9.0)], [SIMPLE._replace(step_seconds=9.0), FSDP]]
    assert choose(config, topology(), rated, [1000, 1000]) == [rated[0][1], FSDP]
    rated[0][1] = rated[0][1]._replace(memory=2000)
    assert choose(config, topology(), rated, [1000, 1000]) == [SIMPLE, rated[1][0]]
    with pytest.raises(UserError, match=r"phases\.1: no tried setting fits round:8 .* use more chips"):
        choose(config, topology(), rated, [1000, 0])


def test_one_program_is_compiled_if_it_fits():
    compiler = Compiler()
    found, (row,), search = search_mesh(run(batch=64, remat="full"), topology(), compiler)
    (chosen,) = choose(CONFIG, topology(), [candidates()], [CHIP.memory])
    assert compiler.tried == [chosen] and chosen.remat == "none", "the policy of the config has no effect"
    assert found.mesh == compiler.calls[0][1] and found.phases[0].accumulation == row["accumulation"]
    assert search["flags"][3:] == [
        "--model.attention reference",
        "--model.remat none",
        f"--phases.0.accumulation {chosen.accumulation}",
    ]
    phase = search["phases"]["0"]
    others = [one for one in candidates() if one != chosen]
    assert phase["rated"] == len(others) + 1 and not search["left_out"]
    assert [one["step_seconds"] for one in phase["shown"]] == [one.step_seconds for one in (chosen, *others[:7])]
    for one, shown in zip(others[:7], phase["shown"][1:], strict=True):
        assert shown["outcome"] == ("slower" if one > chosen else "faster within the error")


@pytest.mark.parametrize("is_compiled", [True, False])
def test_too_large_candidates_are_not_compiled(is_compiled):
    """On TPUs a margin is left for the error of the estimate; on GPUs nothing is compiled."""
    every = candidates()
    memory = min(one.memory for one in every) / (1 + 0.9 * MARGIN)
    compiler = Compiler(0.8)
    if is_compiled:
        search_mesh(CONFIG, topology(memory=memory), compiler)
        assert memory < compiler.tried[0].memory <= memory * (1 + MARGIN)
    else:
        with pytest.raises(UserError, match="no tried setting fits"):
            search_mesh(CONFIG, topology(memory=memory, is_compiled=False), compiler)
        assert not compiler.calls


def test_after_one_that_did_not_fit_smaller_ones_are_tried():
    compiler = Compiler(*[1e9] * (MAX_TRIED - 1))
    *_, search = search_mesh(CONFIG, topology(), compiler)
    sizes = [one.memory for one in compiler.tried]
    assert len(sizes) == MAX_TRIED == 6
    assert all(after <= before * RETRY_FACTOR for before, after in itertools.pairwise(sizes))
    shown = search["phases"]["0"]["shown"]
    assert [one["outcome"] for one in shown[:6]] == 5 * ["does not fit"] + ["chosen"]
    compiler = Compiler(*[1e9] * 7)
    with pytest.raises(UserError, match=r"phases\.0: no tried setting fits round:8 .* use more chips"):
        search_mesh(CONFIG, topology(), compiler)
    assert len(compiler.calls) == 6


@pytest.mark.parametrize("seconds", [60.0, 100.0])
def test_programs_that_would_end_after_the_limit_are_left_out_by_name(seconds):
    """The phase that needs the most memory is compiled first; the other one has its estimate."""
    config = dataclasses.replace(CONFIG, phases=(*CONFIG.phases, run(batch=64, seq_len=64).phases[0]))
    compiler = Compiler(seconds=seconds)
    _, rows, search = search_mesh(config, topology(), compiler, lambda: compiler.spent)
    is_left_out = 2 * seconds > CPU_SECONDS
    assert [phase for phase, *_ in compiler.calls] == [1, 0]
    assert compiler.spent == (seconds if is_left_out else 2 * seconds)
    assert [row["compiled"] for row in rows] == [not is_left_out, True] and all(row["fits"] for row in rows)
    assert [one.split(",")[0] for one in search["left_out"]] == ["phases.0 was not compiled"] * is_left_out


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(UserError, match="cannot be split over 8 device"):
        search_mesh(run(batch=3), topology(), Compiler())
