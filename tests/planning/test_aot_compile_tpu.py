"""Programs that libtpu compiles for absent TPUs: memory, collectives, the error of those that do not fit."""

import dataclasses
import importlib.util

import jax
import pytest

from bert_jax import config as config_lib
from bert_jax.chips import GIB
from bert_jax.cli import main as cli
from bert_jax.config import MeshConfig, presets
from bert_jax.distributed.jax_setup import cuda_plugin_versions
from bert_jax.planning import aot_compile, hlo, topologies
from bert_jax.planning.compiler_output import CompilerOutput, cached_output
from tests.multi_device.exchanges import gradients_sent, lower_naive, table_gathers
from tests.pages import run_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]
ACCUMULATION = 2
TABLE = 4096, 128
"""Word embeddings."""
DATA, FSDP, TENSOR = (8, 1, 1), (1, 8, 1), (2, 2, 2)


@pytest.fixture(scope="module")
def config():
    """bert_tiny with a smaller vocabulary, shorter rows, and no loop over layers."""
    config = config_lib.replace(presets.load_config("bert_tiny"), model={"vocab_size": TABLE[0], "scan_unroll": 2})
    return with_phase(config, seq_len=64)


def with_phase(config, **changes):
    return dataclasses.replace(config, phases=(dataclasses.replace(config.phases[0], **changes),))


def abstract_arguments(config, mesh):
    return aot_compile.Programs(aot_compile.compile_only_task(config), mesh).step_arguments(0)


@pytest.fixture(scope="module")
def topology():
    return topologies.parse_topology("v5e:2x4")


@pytest.fixture(scope="module")
def programs(config, topology):
    """Compiled steps by mesh."""
    return {
        sizes: aot_compile.compiled_step_stats(config, 0, topology.mesh(MeshConfig(*sizes)), ACCUMULATION)
        for sizes in (DATA, FSDP, TENSOR)
    }


@pytest.fixture(scope="module")
def parameters(config, topology):
    state = abstract_arguments(config, topology.mesh(MeshConfig()))[0]
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))


@pytest.fixture(scope="module")
def naive(config, topology):
    """Collectives of a naive program, in which the checks must fail."""
    mesh = topology.mesh(MeshConfig(2, 4, 1))
    state, rows, _ = abstract_arguments(config, mesh)
    lowered = lower_naive(aot_compile.compile_only_task(config).in_phase(0), state.params, rows, ACCUMULATION)

    def compile_it():
        with topologies.compiling_for_absent_devices():
            return CompilerOutput(printed=lowered.compile().as_text())

    return hlo.parse_collectives(cached_output(lowered, mesh.devices, {}, compile_it).printed)


def test_gradients_cross_devices_once(programs, naive, parameters):
    """By an all-reduce of 4 bytes per parameter, sent twice, or a reduce-scatter; with several micro-batches."""
    for sizes, program in programs.items():
        tensor = sizes[2]  # each device of the axis reduces its part of the gradients, and activations
        assert gradients_sent(program.collectives) <= 1.05 * 8 * parameters, sizes
        assert gradients_sent(program.collectives) >= 0.5 * 8 * parameters / tensor, sizes
    assert gradients_sent(naive) > 1.5 * 8 * parameters, "the control reduces in every micro-batch"
    # XLA splits products over tensor, which needs collectives in every micro-batch.
    assert {one.executions for one in programs[TENSOR].collectives} == {1, ACCUMULATION}


def test_the_embedding_table_is_not_gathered(programs):
    for sizes in (DATA, TENSOR):
        assert not table_gathers(programs[sizes].collectives, *TABLE), sizes
    (gathered,) = table_gathers(programs[FSDP].collectives, *TABLE)
    assert gathered.executions == 1, "split over fsdp, it is gathered once per step"


def test_memory_is_divided(programs, parameters):
    whole, split = (programs[sizes].argument_bytes for sizes in (DATA, FSDP))
    assert 12 * parameters <= whole <= 1.05 * 12 * parameters
    assert whole / 8 <= split <= 1.25 * whole / 8, "arrays are padded to tiles of 8 x 128"
    for program in programs.values():
        assert program.argument_bytes + program.temporary_bytes <= program.total_bytes


def test_slices(config, parameters):
    """Two slices of four chips: transfers between them are found, and are at most the gradients."""
    topology = topologies.parse_topology("2xv5e:2x2")
    mesh = topology.mesh(MeshConfig())
    assert [device.slice_index for device in mesh.devices.flat] == [0] * 4 + [1] * 4
    program = aot_compile.compiled_step_stats(config, 0, mesh, 1)
    sent = hlo.array_bytes_by_kind(program.collectives)[hlo.BETWEEN_SLICES]
    assert 0.1 * 4 * parameters < sent <= 1.05 * 4 * parameters


def test_programs_that_do_not_fit(config):
    large = with_phase(config, batch_size=2**16)
    refused = aot_compile.compiled_step_stats(large, 0, topologies.parse_topology("v5e:1x1").mesh(MeshConfig()), 1)
    assert isinstance(refused, aot_compile.OutOfMemoryReport)
    assert refused.needed_bytes > 16 * GIB


@pytest.mark.parametrize("name", ["v3:2x2", "v4:2x2x1", "v5p:2x2x1", "v6e:2x2"])
def test_devices_of_topologies(name):
    found = topologies.parse_topology(name)
    assert (found.count, found.chips) == ((8, 4) if name.startswith("v3") else (4, 4))
    assert found.chip.name == name.split(":")[0]
    assert found.mesh(MeshConfig()).devices.shape == (found.count, 1, 1)


def test_hosts_are_those_of_the_topology(capfd):
    """`plan` refuses what `pretrain` refuses on them."""
    flags = ["--model.num-heads", "8", "--mesh.tensor", "8"]
    names = ["v5e:1x1", "v5e:2x2", "v5e:4x4", "v4:2x2x1", "v4:2x2x2", "v3:4x4", "2xv5e:4x4"]
    assert [topologies.parse_topology(name).hosts for name in names] == [1, 1, 4, 1, 2, 4, 8]
    assert cli.main(["plan", "bert_tiny", "--topology", "v5e:4x4", *flags]) == 2
    err = capfd.readouterr().err
    assert "mesh data x fsdp splits rows over 2 device(s), but there are 4 processes" in err


@pytest.mark.skipif(not cuda_plugin_versions(), reason="the extra plan-gpu is not installed")
def test_commands_of_the_page(tmp_path, monkeypatch):
    """Here, because compilation for TPUs changes the process (tests/conftest.py)."""
    run_page("docs/plan.md", tmp_path, monkeypatch)
