"""The search with a fake compiler: what it compiles, in which order, and the outcomes of the others."""

import dataclasses
import itertools

import pytest

from bert_jax.chips import Sizes
from bert_jax.errors import UserError
from bert_jax.planning import mesh_search
from bert_jax.planning.mesh_search import MARGIN, MAX_COMPILED, RETRY_FACTOR, search_mesh
from bert_jax.planning.topologies import Topology
from tests.planning.machines import CHIP, run

CONFIG = run(batch=64)


def topology(count=8, slices=1, memory=CHIP.memory, is_compiled=True, hosts=1):
    chip = dataclasses.replace(CHIP, memory=memory)
    return Topology("round:8", chip, count, slices, hosts, () if is_compiled else None)


def candidates(config=CONFIG, **figures):
    return sorted(mesh_search.candidates(config, 0, topology(**figures)))


class Compiler:
    """Fake of `run_plan.plan_phase`: programs need the estimated bytes, times a factor by the number of the call."""

    def __init__(self, *factors: float):
        self.factors, self.calls, self.tried = itertools.chain(factors, itertools.repeat(1.0)), [], []

    def __call__(self, config, phase, topology, accumulation):
        self.calls.append((phase, config.mesh, config.model.remat, accumulation))
        sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
        rated = mesh_search.candidates(config, phase, topology)
        setting = sizes, accumulation, config.model.remat
        (found,) = (one for one in rated if (tuple(one.sizes[:3]), one.accumulation, one.remat) == setting)
        self.tried.append(found)
        needed = found.memory * next(self.factors)
        fits, compiled = needed <= topology.chip.memory, topology.devices is not None
        return {"fits": fits, "memory": {"total": needed}, "accumulation": accumulation, "compiled": compiled}


def test_every_host_has_rows_of_its_own():
    """Of 8 devices, each of 4 hosts has two."""
    one_host, four_hosts = (
        {(one.sizes.data * one.sizes.fsdp, one.sizes.tensor) for one in candidates(wide, hosts=hosts)}
        for wide in [run(batch=64, num_heads=4)]
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


def test_the_fastest_that_fits_is_chosen_after_one_compilation():
    compiler = Compiler()
    found, (row,), search = search_mesh(run(batch=64, remat="full"), topology(), compiler)
    fastest, *others = candidates()
    assert compiler.tried == [fastest] and fastest.remat == "none", "the policy of the config has no effect"
    assert found.mesh == compiler.calls[0][1] and found.phases[0].accumulation == row["accumulation"]
    assert search["flags"][3:] == [
        "--model.attention reference",
        "--model.remat none",
        f"--phases.0.accumulation {fastest.accumulation}",
    ]
    phase = search["phases"]["0"]
    assert phase["rated"] == len(others) + 1
    assert [one["outcome"] for one in phase["shown"]] == ["chosen"] + 7 * ["slower"]
    assert [one["step_seconds"] for one in phase["shown"]] == [one.step_seconds for one in (fastest, *others[:7])]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_too_large_candidates_are_not_compiled(is_compiled):
    """On TPUs a margin is left for the error of the estimate; on GPUs nothing is compiled."""
    every = candidates()
    limit = sorted(one.memory for one in every)[len(every) // 4]
    compiler = Compiler()
    search_mesh(CONFIG, topology(memory=limit, is_compiled=is_compiled), compiler)
    margin = MARGIN if is_compiled else 0
    assert compiler.tried[0] == next(one for one in every if one.memory <= limit * (1 + margin))
    assert compiler.tried[-1].memory <= limit


def test_after_one_that_did_not_fit_smaller_ones_are_tried():
    compiler = Compiler(*[1e9] * (MAX_COMPILED - 1))
    *_, search = search_mesh(CONFIG, topology(), compiler)
    sizes = [one.memory for one in compiler.tried]
    assert len(sizes) == MAX_COMPILED == 6
    assert all(after <= before * RETRY_FACTOR for before, after in itertools.pairwise(sizes))
    shown = search["phases"]["0"]["shown"]
    assert [one["outcome"] for one in shown[:7]] == 5 * ["does not fit"] + ["chosen", "slower"]
    compiler = Compiler(*[1e9] * 7)
    with pytest.raises(UserError, match=r"phases\.0: no tried setting fits round:8 .* use more chips"):
        search_mesh(CONFIG, topology(), compiler)
    assert len(compiler.calls) == 6


def test_one_mesh_and_policy_for_all_phases():
    """Those of the longest phase; every other phase has a program left."""
    long = run(batch=64, seq_len=64).phases[0]
    config = dataclasses.replace(CONFIG, phases=(*CONFIG.phases, long))
    limit = min(one.memory for one in mesh_search.candidates(config, 1, topology()))
    alone, together = Compiler(), Compiler()
    search_mesh(CONFIG, topology(memory=limit, is_compiled=False), alone)
    search_mesh(config, topology(memory=limit, is_compiled=False), together)
    (longest, other) = together.calls
    assert (longest[0], other[0]) == (1, 0) and longest[1:3] == other[1:3] != alone.calls[0][1:3]
    refused = Compiler(*[1e9] * 6)
    with pytest.raises(UserError, match=r"phases\.1"):
        search_mesh(config, topology(), refused)
    assert len(refused.calls) == 5


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(UserError, match="cannot be split over 8 device"):
        search_mesh(run(batch=3), topology(), Compiler())
