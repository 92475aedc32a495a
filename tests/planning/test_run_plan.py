"""`bert-jax plan`: the figures of a phase, the whole run, one-line errors, topologies."""

import dataclasses
import importlib.util
import json
import math
import re
from unittest import mock

import pytest

from bert_jax import config as config_lib
from bert_jax.chips import CHIPS, GIB, Sizes
from bert_jax.cli import main as cli
from bert_jax.config import MeshConfig, presets
from bert_jax.errors import UserError
from bert_jax.planning import aot_compile, mesh_search, published_runs, run_plan, topologies, workload
from bert_jax.planning.hlo import Collective
from bert_jax.planning.kernels import Kernel
from bert_jax.planning.topologies import Topology
from bert_jax.report.text import render
from bert_jax.training.pretraining_task import model_spec

CUDNN = "--model.attention cudnn --model.attention-dropout 0 --model.compute-dtype bfloat16"
GPUS = Topology("h100:2x4", CHIPS["h100"], 8, 2, 2, None)


@pytest.fixture(autouse=True)
def no_gpu_compiler(monkeypatch):
    """Whether the extra `plan-gpu` is installed or not."""
    monkeypatch.setattr(topologies, "cuda_plugin_versions", dict)


@dataclasses.dataclass(frozen=True)
class FakeTopology(Topology):
    """A TPU topology without compiler."""

    def mesh(self, config):
        return dataclasses.replace(GPUS, slices=1).mesh(config)


TPUS = FakeTopology("v3:2x2", CHIPS["v3"], 8, 1, 1, ())


def text_of(plan):
    return " ".join(render(run_plan.to_sections(plan)).split())


@pytest.fixture
def config():
    return config_lib.replace(presets.load_config("bert_tiny"), evaluation={"batch_size": 12})


@pytest.fixture
def compiled(monkeypatch):
    """Replaces the compiler: programs of given bytes, with an all-reduce of 1 MiB over data."""

    def replace(total, found=None):
        exchange = Collective("all-reduce", ("f32[262144]",), 2**20, 1, tuple(range(8)))
        program = aot_compile.CompiledStepStats(total // 2, total // 4, total, [exchange], found)
        monkeypatch.setattr(aot_compile, "compiled_step_stats", mock.Mock(return_value=program))
        return aot_compile.compiled_step_stats

    replace(2 * GIB)
    return replace


def test_figures_of_a_row(config, compiled):
    found = run_plan.plan(config, TPUS, price=2.0)
    (row,) = found["phases"]
    memory = row["memory"]
    parameters = workload.count_parameters(model_spec(config, -1), Sizes(data=8)).total
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
    assert "at the given price" in text_of(found) and "one of the 2 cores" in text_of(found)
    json.dumps(found)


def test_a_phase_that_does_not_fit(config, monkeypatch, compiled):
    """The compiler stops, before or after it counts the arguments; or the program is larger than the chip's memory."""
    stored = 12 * workload.count_parameters(model_spec(config, -1), Sizes(data=8)).total
    for counted, more in ((True, 0), (False, stored)):
        report = aot_compile.OutOfMemoryReport(20 * GIB, counted)
        monkeypatch.setattr(aot_compile, "compiled_step_stats", mock.Mock(return_value=report))
        found = run_plan.plan(config, TPUS)
        (row,) = found["phases"]
        assert row["memory"]["total"] == 20 * GIB + more and row["step_seconds"] is None and not row["fits"]
        assert row["short_by"] == 20 * GIB + more - int(15.48 * GIB)
        assert "does not fit, by at least 4.5" in text_of(found) and "the run does not fit" in text_of(found)
    compiled(17 * GIB)
    assert not run_plan.plan(config, TPUS)["phases"][0]["fits"]


def test_gpus_are_estimated(config):
    found = run_plan.plan(config, GPUS)
    (row,) = found["phases"]
    assert not row["compiled"] and row["collectives"] is None and row["memory"]["total"] > 0
    assert "sent over data, by estimate" in text_of(found) and "lowered for GPUs, not compiled" in text_of(found)
    assert "fits yes, by estimate" in text_of(found) and "the compiler (0.8 GB): pip install" in text_of(found)


def test_compiled_gpus(config, compiled):
    """With their compiler, memory, collectives and kernels are those of the program."""
    kernel = Kernel("f", "products", "", "f32[8]", 2**20, 2**20, 3, None, 0)
    compiled(2 * GIB, [kernel, kernel._replace(kind="copies")])
    topology = FakeTopology("h100:1x8", CHIPS["h100"], 8, 1, 1, ())
    found = run_plan.plan(config, topology)
    (row,) = found["phases"]
    assert row["compiled"] and row["memory"]["total"] == 2 * GIB and row["sent"]["data"] == 2 * 2**20 * 7 / 8
    assert row["kernels"] == {kind: {"kernels": 3, "bytes": 6 * 2**20} for kind in ("products", "copies")}
    assert "kernels: products 3, 6.00 MiB" in text_of(found) and "by estimate" not in text_of(found)
    json.dumps(found)


def test_cycles_of_tpus(config, compiled):
    """At the clock of the chip."""
    compiled(2 * GIB, [Kernel("f", "products", "", "f32[8]", 1, 1, 3, None, 94_000_000)])
    found = run_plan.plan(config, TPUS)
    assert found["phases"][0]["kernels"] == {"products": {"kernels": 3, "seconds": pytest.approx(0.3)}}
    assert "kernels: products 3, 0.3 s by the compiler's estimate" in text_of(found)


@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if not chip.torus_dimensions])
def test_every_gpu_is_described(name):
    """With the figures of the table of chips."""
    text = (topologies.DESCRIPTIONS / f"{name}.txtpb").read_text()
    chip = CHIPS[name]

    def figure(field):
        return float(re.search(rf"\b{field}: ([\d.]+)", text)[1])

    assert re.search(r'device_description_str: "(.*)"', text)[1].startswith(chip.device_kinds)
    assert (figure("memory_bandwidth"), 0.75 * figure("device_memory_size")) == (chip.memory_bandwidth, chip.memory)
    lanes = figure("core_count") * figure("fpus_per_core") * 1e9 * figure("clock_rate_ghz")
    assert math.isclose(lanes, chip.vector_ops, rel_tol=0.08)
    assert figure("shared_memory_per_core") - figure("shared_memory_per_block_optin") == 1024


def test_the_compiler_for_gpus_has_the_version_of_jax(monkeypatch, capsys):
    monkeypatch.setattr(topologies, "cuda_plugin_versions", lambda: {"jax-cuda13-plugin": "0.0.1"})
    assert cli.main(["plan", "bert_tiny", "--topology", "h100:1x8"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert "jax-cuda13-plugin 0.0.1 is installed, which cannot compile programs of jaxlib 0." in err


def test_time_of_ramps_and_clocks(config, compiled):
    def planned(micro_batch=None, **changes):
        phases = (dataclasses.replace(config.phases[0], **changes),)
        plan = run_plan.plan(config_lib.replace(config, phases=phases), TPUS, micro_batch)
        return plan["run"]["hours"], plan["phases"][0]["step_seconds"], phases[0]

    hours, seconds, phase = planned(1, start_batch_size=8, ramp_steps=config.phases[0].steps // 2, accumulation=2)
    # In the first part of the run, batches have half the rows.
    rows = phase.rows_before(phase.steps)
    assert rows < phase.steps * 16 and math.isclose(hours, rows / 16 * seconds / 3600)
    long, _, _ = planned()
    assert planned(hours=long / 2)[0] == long / 2


def test_parameters_that_cannot_be_divided_are_named(compiled):
    config = dataclasses.replace(presets.load_config("bert_base"), mesh=MeshConfig(2, 1, 4))
    text = text_of(run_plan.plan(config, TPUS))
    table = "encoder/embeddings/word is copied, not split: mesh.tensor 4 does not divide its dimension 0, 30,522"
    assert f"{table}; {3 * 4 * 30522 * 768 / GIB:.2f} GiB with its moments on each device" in text
    assert "mlm/bias is copied" in text and text.count("is copied") == 2
    assert "is copied" not in text_of(
        run_plan.plan(config_lib.replace(config, mesh={"data": 1, "fsdp": 8, "tensor": 1}), TPUS)
    )


def test_search(config, compiled):
    """The plan has the row of the program that the search compiled."""
    compiled_step_stats = compiled(GIB)
    phase = config.phases[0]
    config = config_lib.replace(config, phases=(phase, dataclasses.replace(phase, steps=1, batch_size=4096)))
    found = run_plan.plan(config, TPUS, search=True)
    assert [call.args[1] for call in compiled_step_stats.call_args_list] == [1, 0], "the largest first"
    assert all(row["fits"] for row in found["phases"]) and [row["phase"] for row in found["phases"]] == [0, 1]
    assert "found: --mesh.data" in text_of(found) and "slower" in text_of(found)
    json.dumps(found)


def test_a_search_says_what_it_left_out(config, compiled, monkeypatch):
    monkeypatch.setattr(mesh_search, "CPU_SECONDS", -1.0)
    found = run_plan.plan(config, TPUS, search=True)
    assert not aot_compile.compiled_step_stats.called and not found["phases"][0]["compiled"]
    assert "left out: phases.0 was not compiled" in text_of(found) and "fits yes, by estimate" in text_of(found)


def test_the_summary_names_the_runs_and_the_error(config, compiled, monkeypatch):
    """Those of the chip's family."""
    monkeypatch.setattr(aot_compile, "trace_step", mock.Mock())
    gpus = "A100 40 GB, A100 80 GB, V100 32 GB"
    h200 = topologies.parse_topology("h200:1x8")
    for topology, hardware, own in (
        (TPUS, "TPU v3", "was not measured on this chip"),
        (GPUS, gpus, "was not measured on this chip"),
        (h200, gpus, "took 1% longer than predicted in two settings on one H200"),
    ):
        found = run_plan.plan(config, topology)
        runs = published_runs.RUNS["TPU" if topology is TPUS else "GPU"]
        assert f"{len(runs)} published runs of other programs on {hardware}, all within 30%" in text_of(found)
        assert f"bert_jax {own}" in text_of(found)


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install 'libtpu"):
        topologies.parse_topology("v5e:2x4")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "there is no chip 'v9'"),
        ("h200", "write v5e:16x16"),
        ("v5e:4by4", "write v5e:16x16"),
        ("v5e:0x4", "write v5e:16x16"),
        ("2xh100:8x8", "number of nodes"),
        ("h100:64", "number of nodes"),
        ("h100:1x64", "a node has 1, 2, 4, 8 GPUs, not 64: write h100:8x8"),
        ("v5e:32x32", "there is no v5e slice of this shape: shapes are 1x1, 2x2"),
        ("v6e:3x3", "there is no v6e slice"),
        ("v4:16x16x32", "there is no v4 slice of this shape: shapes are 2x2x1, 2x2x2"),
        ("v4:4x4", "there is no v4 slice"),
        ("v5p:8x4x4", "AxBxC of multiples of 4, A <= B <= C, up to 16x16x24"),
        ("v5p:20x20x20", "there is no v5p slice"),
        ("v3:64x32", "8x16, 16x16, 16x32, 32x32"),
    ],
)
def test_names_that_are_no_topology(name, message):
    with pytest.raises(UserError) as error:
        topologies.parse_topology(name)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--topology v9:2x2", "there is no chip 'v9'"),
        ("--topology h100:1x8 --mesh.data 3", "does not fit 8 devices"),
        ("--topology h100:2x4 --mesh.data 1 --mesh.fsdp 8", "are in 2 slices"),
        ("--topology h100:1x8 --mesh.tensor 4", "does not divide the 2 attention heads"),
        (f"--topology h100:1x8 {CUDNN}", "model.attention 'cudnn' is compiled by cuDNN, which needs a GPU"),
        ("--topology h100:8x8", "is not divisible by 64 row shards"),
        ("--topology h100:1x8 --micro-batch 3", "--micro-batch 3 does not split"),
        ("--topology h100:1x8 --micro-batch auto", "--micro-batch auto needs a device"),
        ("--topology h100:1x8 --micro-batch 2 --search", "--search chooses the micro-batch"),
        ("--topology h100:1x8 --price-per-chip-hour -1", "--price-per-chip-hour is -1: it must be a number in [0, "),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert cli.main(["plan", "bert_tiny", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(aot_compile, "trace_step", mock.Mock())  # `test_gpus_are_estimated` traces
    command = ["plan", "bert_tiny", "--topology", "h100:1x8", "--price-per-chip-hour", "2.5"]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"data": 8, "fsdp": 1, "tensor": 1} and found["run"]["cost"] > 0
    assert cli.main(command) == 0
    assert capsys.readouterr().out.startswith("bert_tiny on h100:1x8: 8 devices, mesh data 8, fsdp 1, tensor 1\n===")
