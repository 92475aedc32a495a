"""`bert-jax plan`: the figures of a phase, the whole run, one-line errors, a search that compiles few programs."""

import dataclasses
import importlib.util
import json
import math
from unittest import mock

import pytest

from bert_jax import config as config_lib
from bert_jax.chips import CHIPS, GIB, Sizes
from bert_jax.cli import main as cli
from bert_jax.config import MeshConfig, presets
from bert_jax.errors import UserError
from bert_jax.planning import aot_compile, mesh_search, run_plan, topologies, workload
from bert_jax.planning.hlo import Collective
from bert_jax.planning.topologies import Topology

GPUS = Topology("h100:2x4", CHIPS["h100"], 8, 2, None)


@dataclasses.dataclass(frozen=True)
class FakeTopology(Topology):
    """A TPU topology without compiler."""

    def mesh(self, config):
        return dataclasses.replace(GPUS, slices=1).mesh(config)


TPUS = FakeTopology("v3:2x2", CHIPS["v3"], 8, 1, ())


def compiler(total: int, calls: list | None = None):
    """Fake of `aot_compile.compile_step`: a program of `total` bytes, with an all-reduce of 1 MiB over data."""

    def compiled(config, phase, mesh, accumulation):
        if calls is not None:
            calls.append((phase, dict(mesh.shape), accumulation, config.model.remat))
        exchange = Collective("all-reduce", ("f32[262144]",), 2**20, 1, tuple(range(8)))
        return aot_compile.CompiledStepStats(total // 2, total // 4, total // 4, total, [exchange], 1.0)

    return compiled


@pytest.fixture
def config():
    return config_lib.replace(presets.load_config("bert_tiny"), evaluation={"batch_size": 12})


def test_figures_of_a_row(config):
    found = run_plan.plan(config, TPUS, price=2.0, compile_step=compiler(2 * GIB))
    (row,) = found["phases"]
    memory = row["memory"]
    parameters = workload.count_parameters(config.model, config.objective.pair != "none", Sizes(data=8)).total
    assert memory["parameters"] == 4 * parameters and memory["moments"] == 8 * parameters
    kinds = ("parameters", "moments", "activations", "temporaries", "other")
    assert sum(memory[kind] for kind in kinds) == memory["total"] == 2 * GIB
    assert row["fits"] and row["short_by"] == 0 and row["compiled"]
    assert row["collectives"] == {"all-reduce": 2**20}
    assert row["sent"] == {"data": 2 * 2**20 * 7 / 8, "fsdp": 0, "tensor": 0, "network": 0}
    assert math.isclose(sum(row["seconds"].values()), row["step_seconds"])
    assert math.isclose(row["mfu"], row["flops"] / row["step_seconds"] / (8 * TPUS.chip.peak_flops))
    hours = config.phases[0].steps * row["step_seconds"] / 3600
    assert found["chips"] == 4, "two devices of v3 are one chip"
    assert math.isclose(found["run"]["hours"], hours) and math.isclose(found["run"]["cost"], 2.0 * 4 * hours)
    text = "\n".join(run_plan.format_lines(found))
    assert "at the given price" in text and "one of the 2 cores" in text
    json.dumps(found)


def test_a_phase_that_does_not_fit_is_a_row(config):
    def refused(config, phase, mesh, accumulation):
        return aot_compile.OutOfMemoryReport(20 * GIB, 16 * GIB, True)

    found = run_plan.plan(config, TPUS, compile_step=refused)
    (row,) = found["phases"]
    assert not row["fits"] and row["short_by"] == 4 * GIB and row["step_seconds"] is None
    text = "\n".join(run_plan.format_lines(found))
    assert "does not fit, by at least 4.00 GiB" in text and "the run does not fit" in text
    # A program that compiles but is larger than the memory in the table of chips does not fit either.
    (row,) = run_plan.plan(config, TPUS, compile_step=compiler(17 * GIB))["phases"]
    assert not row["fits"]


def test_gpus_are_estimated(config):
    found = run_plan.plan(config, GPUS)
    (row,) = found["phases"]
    assert not row["compiled"] and row["collectives"] is None and row["memory"]["total"] > 0
    text = "\n".join(run_plan.format_lines(found))
    assert "sends from each device, by estimate" in text and "lowered for GPUs, not compiled" in text


def test_time_of_ramps_and_clocks(config):
    long = run_plan.plan(config, TPUS, compile_step=compiler(GIB))["run"]["hours"]
    ramp = {"start_batch_size": 8, "ramp_steps": config.phases[0].steps // 2, "accumulation": 2}
    phases = (dataclasses.replace(config.phases[0], **ramp),)
    assert config.phases[0].batch_size == 16
    ramping = run_plan.plan(config_lib.replace(config, phases=phases), TPUS, 1, compile_step=compiler(GIB))
    step = ramping["phases"][0]["step_seconds"]
    # In the first part of the run, batches have half the rows.
    rows = phases[0].rows_before(phases[0].steps)
    assert rows < phases[0].steps * 16
    assert math.isclose(ramping["run"]["hours"], rows / 16 * step / 3600)
    timed = (dataclasses.replace(config.phases[0], hours=long / 2),)
    assert (
        run_plan.plan(config_lib.replace(config, phases=timed), TPUS, compile_step=compiler(GIB))["run"]["hours"]
        == long / 2
    )


def test_a_table_that_cannot_be_divided_is_named():
    config = presets.load_config("bert_base")
    config = dataclasses.replace(config, mesh=MeshConfig(2, 1, 4))
    text = "\n".join(run_plan.format_lines(run_plan.plan(config, TPUS, compile_step=compiler(GIB))))
    assert "encoder/embeddings/word is copied, not split: mesh.tensor 4 does not divide its dimension 0, 30,522" in text


def test_the_search_compiles_few(config, monkeypatch):
    calls: list = []
    monkeypatch.setattr(aot_compile, "compile_step", compiler(GIB, calls))
    phase = config.phases[0]
    # Alone, the second phase would get another mesh: its large batch reduces the relative cost of parameters.
    config = config_lib.replace(config, phases=(phase, dataclasses.replace(phase, steps=1, batch_size=4096)))
    search = mesh_search.search_mesh(config, TPUS)
    assert len(calls) == 2 and [phase for phase, *_ in calls] == [0, 1], (
        "the longest first, and one that fits is enough"
    )
    assert calls[0][1] == calls[1][1] and calls[0][3] == calls[1][3], "one mesh and one policy"
    found = run_plan.plan(search.config, TPUS, compile_step=search.compiled_step)
    assert len(calls) == 2 and all(row["fits"] for row in found["phases"])
    assert any(line.startswith("found: --mesh.data") for line in mesh_search.format_lines(search))
    json.dumps(mesh_search.to_dict(search))
    calls.clear()
    monkeypatch.setattr(aot_compile, "compile_step", compiler(100 * GIB, calls))
    with pytest.raises(UserError, match="no tried setting fits"):
        mesh_search.search_mesh(config, TPUS)
    assert 1 <= len(calls) <= 6


MISTAKES = {
    "v7:2x2": "there is no chip 'v7'",
    "h200": "did you mean 'h200:8x8'",
    "v5e:4by4": "write v5e:16x16",
    "v5e:0x4": "at least 1",
    "2xh100:8x8": "number of nodes",
    "h100:64": "number of nodes",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_topologies(name):
    with pytest.raises(UserError, match=MISTAKES[name]) as error:
        topologies.parse_topology(name)
    assert "\n" not in str(error.value)


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install 'libtpu"):
        topologies.parse_topology("v5e:2x4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--topology v9:2x2", "there is no chip 'v9'"),
        ("--topology h100:1x8 --mesh.data 3", "does not fit 8 devices"),
        ("--topology h100:2x4 --mesh.data 1 --mesh.fsdp 8", "are in 2 slices"),
        ("--topology h100:1x8 --mesh.tensor 4", "does not divide the 2 attention heads"),
        ("--topology h100:8x8", "is not divisible by 64 row shards"),
        ("--topology h100:1x8 --micro-batch 3", "--micro-batch 3 does not split"),
        ("--topology h100:1x8 --micro-batch auto", "--micro-batch auto needs a device"),
        ("--topology h100:1x8 --micro-batch 2 --search", "--search chooses the micro-batch"),
        ("--topology h100:1x8 --price-per-chip-hour -1", "--price-per-chip-hour is -1: it must be a number in [0, 1e30] or None"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert cli.main(["plan", "bert_tiny", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(aot_compile, "trace_step", mock.Mock())  # `test_gpus_are_estimated` traces
    assert cli.main(["plan", "bert_tiny", "--topology", "h100:1x8", "--price-per-chip-hour", "2.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"data": 8, "fsdp": 1, "tensor": 1} and found["run"]["cost"] > 0
