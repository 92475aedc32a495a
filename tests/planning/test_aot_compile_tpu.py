"""Programs that libtpu compiles for absent TPUs: memory, collectives, and the error of those that do not fit."""

import dataclasses
import importlib.util
import subprocess
import sys

import jax
import pytest

from bert_jax import config as config_lib
from bert_jax.chips import GIB
from bert_jax.config import MeshConfig, presets
from bert_jax.planning import aot_compile, hlo, topologies
from tests.multi_device.exchanges import compile_naive, gradients_sent, table_gathers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]
ACCUMULATION = 2
TABLE = 30522, 128
"""Word embeddings of bert_tiny."""


@pytest.fixture(scope="module")
def topology():
    return topologies.parse_topology("v5e:2x4")


@pytest.fixture(scope="module")
def config():
    return presets.load_config("bert_tiny")


@pytest.fixture(scope="module")
def programs(config, topology):
    """Compiled steps by mesh and accumulation."""
    cases = [((8, 1, 1), 1), ((8, 1, 1), ACCUMULATION), ((1, 8, 1), ACCUMULATION), ((2, 2, 2), 1)]
    return {
        (sizes, count): aot_compile.compile_step(config, 0, topology.mesh(MeshConfig(*sizes)), count)
        for sizes, count in cases
    }


@pytest.fixture(scope="module")
def parameters(config, topology):
    state = aot_compile.Programs(aot_compile.compile_only_task(config), topology.mesh(MeshConfig())).step_arguments(0)[
        0
    ]
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))


@pytest.fixture(scope="module")
def naive(config, topology):
    """Collectives of naive programs, in which the checks must fail."""

    def collectives(data: int, fsdp: int):
        mesh = topology.mesh(MeshConfig(data, fsdp, 1))
        state, rows, _ = aot_compile.Programs(aot_compile.compile_only_task(config), mesh).step_arguments(0)
        with aot_compile._no_cache():
            program = compile_naive(aot_compile.compile_only_task(config).at(0), state.params, rows, ACCUMULATION)
        return hlo.parse_collectives(program.as_text())

    return {"data": collectives(8, 1), "fsdp": collectives(1, 8)}


def test_gradients_cross_devices_once(programs, naive, parameters):
    """By an all-reduce of 4 bytes per parameter, sent twice, or a reduce-scatter; for any accumulation."""
    for case, program in programs.items():
        tensor = case[0][2]  # each device of the axis reduces its part of the gradients, and activations
        assert gradients_sent(program.collectives) <= 1.05 * 8 * parameters, case
        assert gradients_sent(program.collectives) >= 0.5 * 8 * parameters / tensor, case
    once, often = (gradients_sent(programs[(8, 1, 1), count].collectives) for count in (1, ACCUMULATION))
    assert often <= 1.01 * once
    assert gradients_sent(naive["data"]) > 1.5 * 8 * parameters, "the control reduces in every micro-batch"


def test_the_embedding_table_is_not_gathered(programs, naive):
    for case in (((8, 1, 1), 1), ((8, 1, 1), ACCUMULATION), ((2, 2, 2), 1)):
        assert not table_gathers(programs[case].collectives, *TABLE), case
    (gathered,) = table_gathers(programs[(1, 8, 1), ACCUMULATION].collectives, *TABLE)
    assert gathered.executions == 1, "split over fsdp, it is gathered once per step"
    assert table_gathers(naive["fsdp"], *TABLE), "the control has nothing to find"


def test_memory_is_divided(programs, parameters):
    whole, split = (programs[case].argument_bytes for case in (((8, 1, 1), ACCUMULATION), ((1, 8, 1), ACCUMULATION)))
    assert 12 * parameters <= whole <= 1.05 * 12 * parameters
    assert whole / 8 <= split <= 1.15 * whole / 8, "arrays are padded to tiles of 8 x 128"
    for program in programs.values():
        assert program.argument_bytes + program.temporary_bytes + program.code_bytes <= program.total_bytes


def test_slices(config):
    """Two slices of four chips: transfers between them are found, and are at most the gradients."""
    topology = topologies.parse_topology("2xv5e:2x2")
    mesh = topology.mesh(MeshConfig())
    assert [device.slice_index for device in mesh.devices.flat] == [0] * 4 + [1] * 4
    program = aot_compile.compile_step(config, 0, mesh, 1)
    parameters = aot_compile.shard_bytes(
        aot_compile.Programs(aot_compile.compile_only_task(config), mesh).step_arguments(0)[0].params
    )
    assert 0.1 * parameters < hlo.bytes_by_kind(program.collectives)[hlo.BETWEEN_SLICES] <= 1.05 * parameters


def test_programs_that_do_not_fit():
    base = presets.load_config("bert_base")
    refused = aot_compile.compile_step(base, 0, topologies.parse_topology("v5e:1x1").mesh(MeshConfig()), 1)
    assert isinstance(refused, aot_compile.OutOfMemoryReport)
    assert refused.available_bytes == 15.75 * GIB and refused.needed_bytes > 20 * GIB


@pytest.mark.parametrize(("topology", "phase"), [("v5e:4x4", 0), ("v5e:4x4", 1), ("v6e:4x4", 1)])
def test_bert_large(topology, phase):
    """16 rows per chip fit, also of 512 tokens; a pod has the same program per chip."""
    large = config_lib.replace(presets.load_config("bert_large"), model={"remat": "full"})
    phases = tuple(dataclasses.replace(one, batch_size=256) for one in large.phases)
    large = dataclasses.replace(large, phases=phases)
    chips = topologies.parse_topology(topology)
    program = aot_compile.compile_step(large, phase, chips.mesh(MeshConfig()), 1)
    assert isinstance(program, aot_compile.CompiledStepStats) and program.total_bytes <= 0.95 * chips.chip.memory
    assert gradients_sent(program.collectives) <= 1.05 * 8 * 336_226_108


@pytest.mark.parametrize("name", ["v3:2x2", "v4:2x2x1", "v5p:2x2x1", "v6e:2x2"])
def test_devices_of_topologies(name):
    found = topologies.parse_topology(name)
    assert (found.count, found.chips) == ((8, 4) if name.startswith("v3") else (4, 4))
    assert found.chip.name == name.split(":")[0]
    assert found.mesh(MeshConfig()).devices.shape == (found.count, 1, 1)


def test_shapes_that_libtpu_refuses():
    command = [sys.executable, "-m", "bert_jax", "plan", "bert_tiny", "--topology", "v6e:3x3"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 2 and not process.stdout
    assert process.stderr.startswith("error: --topology v6e:3x3: libtpu does not support this shape")
    assert process.stderr.count("\n") == 1
