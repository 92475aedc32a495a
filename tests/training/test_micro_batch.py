"""--micro-batch: a number, or what fits into the memory at hand; no result depends on it."""

import dataclasses
import json
import os
from types import SimpleNamespace

import jax
import pytest

from bert_jax.config import CheckpointConfig, Config, MeshConfig, Phase
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.planning.aot_compile import compile_only_task
from bert_jax.training import micro_batch, pretraining
from bert_jax.training.micro_batch import (
    TrainSteps,
    choose_accumulations,
    requested_accumulation,
    smallest_fitting_accumulation,
)
from bert_jax.training.programs import Programs
from bert_jax.training.run_directory.ledger import Ledger
from bert_jax.training.sharding import make_mesh
from tests.runs import Killed, assert_close, numbers

PHASE = Phase(batch_size=16)
CONFIG = Config(name="fitted", phases=(PHASE, PHASE, PHASE))
RAMP = Phase(batch_size=16, start_batch_size=4, ramp_steps=8, accumulation=4)


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])


class Compiler:
    """Programs that need 100 bytes, and 1600 for what a whole batch of PHASE keeps; `tried` lists them."""

    def __init__(self, refused=()):
        self.tried, self.refused = [], refused

    def __call__(self, count: int):
        self.tried.append(count)
        if count in self.refused:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")
        sizes = SimpleNamespace(
            argument_size_in_bytes=60,
            output_size_in_bytes=70,
            alias_size_in_bytes=50,
            temp_size_in_bytes=20 + 1600 // count,
        )
        return SimpleNamespace(count=count, memory_analysis=lambda: sizes)


def give_memory(monkeypatch, size: float) -> None:
    """So that programs of up to `size` bytes fit."""
    monkeypatch.setattr(micro_batch, "available_memory", lambda device: size / micro_batch.MEMORY_SHARE)


@pytest.mark.parametrize(("size", "count"), [(1e12, 1), (1701, 1), (1699, 2), (501, 4), (301, 8), (201, 16)])
def test_the_largest_that_fits(mesh, tmp_path, monkeypatch, size, count):
    give_memory(monkeypatch, size)
    compiler, ledger = Compiler(), Ledger(tmp_path / "ledger")
    found, program = smallest_fitting_accumulation(CONFIG, 0, mesh, ledger, compiler)
    assert (found, program.count) == (count, count) and compiler.tried == [n for n in (1, 2, 4, 8, 16) if n <= count]
    (entry,) = ledger.entries_of("micro_batch")
    assert (entry["accumulation"], entry["bytes"], entry["phase"]) == (count, 100 + 1600 // count, 0)


def test_large_batches_are_cut_before_the_first_try(mesh, tmp_path, monkeypatch):
    """A program for far more rows than fit takes long to compile, if it can be compiled at all."""
    large = dataclasses.replace(CONFIG, phases=(Phase(batch_size=4096),))  # of 128 tokens
    for size, tried, count in ((1e12, [8, 4, 2, 1], 1), (400, [8, 4], 8), (200, [8, 16], 16)):
        give_memory(monkeypatch, size + 1)
        compiler, path = Compiler(), tmp_path / str(size)
        assert smallest_fitting_accumulation(large, 0, mesh, Ledger(path), compiler)[0] == count
        assert compiler.tried == tried


def test_nothing_fits(mesh, tmp_path, monkeypatch):
    give_memory(monkeypatch, 199)
    with pytest.raises(UserError, match=r"phases\.2: one row at a time .* 90% of .*mesh\.fsdp.*model\.remat full"):
        smallest_fitting_accumulation(CONFIG, 2, mesh, Ledger(tmp_path / "ledger"), Compiler())
    assert not (tmp_path / "ledger").exists()


def test_a_compiler_that_refuses_what_does_not_fit(mesh, tmp_path, monkeypatch):
    """As TPUs do; any other complaint is no answer."""
    give_memory(monkeypatch, 1e12)
    assert smallest_fitting_accumulation(CONFIG, 0, mesh, Ledger(tmp_path / "ledger"), Compiler(refused=(1, 2)))[0] == 4

    def broken(count):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such thing")

    with pytest.raises(jax.errors.JaxRuntimeError, match="no such thing"):
        smallest_fitting_accumulation(CONFIG, 1, mesh, Ledger(tmp_path / "ledger"), broken)


def test_what_was_found_is_not_searched_again(mesh, tmp_path, monkeypatch):
    """Not on the same devices in the same phase; elsewhere, or with other settings of model or phase, it is."""
    give_memory(monkeypatch, 501)
    smallest_fitting_accumulation(CONFIG, 0, mesh, Ledger(tmp_path / "ledger"), Compiler())
    give_memory(monkeypatch, 1e12)
    compiler = Compiler()
    assert (
        smallest_fitting_accumulation(CONFIG, 0, mesh, Ledger(tmp_path / "ledger"), compiler) == (4, None)
        and not compiler.tried
    )
    entry = json.loads((tmp_path / "ledger").read_text())
    elsewhere = {
        "phase": 1,
        "devices": 8,
        "device": "TPU v5 lite",
        "mesh": {"data": 8, "fsdp": 1, "tensor": 1},
        "remat": "full",
        "start_batch_size": 4,
        "max_predictions": 20,
    }
    for name, value in elsewhere.items():
        assert entry[name] != value
        path = tmp_path / name
        path.write_text(json.dumps(entry | {name: value}) + "\n")
        assert smallest_fitting_accumulation(CONFIG, 0, mesh, Ledger(path), Compiler())[0] == 1, name
        assert len(Ledger(path).entries_of("micro_batch")) == 2


class Step:
    """A train step whose program needs what `Compiler` says, times `times`."""

    def __init__(self, accumulation, times):
        self.times, self.program = times, Compiler()(accumulation)

    def memory_analysis(self):
        sizes = vars(self.program.memory_analysis())
        return SimpleNamespace(**{name: self.times * size for name, size in sizes.items()})

    def __call__(self, *arguments):
        raise AssertionError("no step may be computed")


class FakePrograms(Programs):
    """In the second phase, the step needs ten times as much memory as in the first."""

    def train_step(self, phase, accumulation, rows=None):
        return Step(accumulation, (1, 10)[phase])


def test_without_a_number_devices_with_known_memory_decide(mesh, tmp_path, monkeypatch, tiny_config):
    """All phases before the first step, each with its decision in the ledger; CPUs take whole batches and decide
    nothing.
    """
    phase = dataclasses.replace(tiny_config.phases[0], batch_size=16)
    programs = FakePrograms(compile_only_task(dataclasses.replace(tiny_config, phases=(phase, phase))), mesh)

    def train_steps(name):
        return TrainSteps(programs, Ledger(tmp_path / name), choose_accumulations(programs, 1))

    here = train_steps("cpu")
    here.precompile(0)
    assert [here.of_phase(i)[1] for i in (0, 1)] == [1, 1] and not Ledger(tmp_path / "cpu").entries
    monkeypatch.setattr(micro_batch, "device_memory", lambda device: 5100 / micro_batch.MEMORY_SHARE)
    there = train_steps("gpu")
    there.precompile(0)
    entries = Ledger(tmp_path / "gpu").entries_of("micro_batch")
    assert [(entry["phase"], entry["accumulation"]) for entry in entries] == [(0, 1), (1, 4)]
    assert [there.of_phase(i)[1] for i in (0, 1)] == [1, 4]
    assert there.of_batch(0, 7)[1:] == (7, 1) and there.of_batch(0, 16)[1:] == (16, 1)
    assert there.of_batch(1, 8)[1:] == (16, 2)  # padded to the rows of four micro-batches
    again = train_steps("gpu")
    again.precompile(1)
    assert again.of_phase(1)[1] == 4 and len(Ledger(tmp_path / "gpu").entries) == 2


def test_equal_phases_share_a_program(tiny_config, mesh):
    """100 equal phases were compiled one by one."""
    phase = tiny_config.phases[0]
    longer = dataclasses.replace(phase, seq_len=2 * phase.seq_len)
    warmed = dataclasses.replace(phase, steps=phase.steps + 1, learning_rate=0.5, warmup_steps=1)
    config = dataclasses.replace(tiny_config, phases=(phase, longer, warmed))
    programs = Programs(compile_only_task(config), mesh)
    first, second, third = (programs.once(("train step", i, 1, None), object) for i in range(3))
    assert first is third and first is not second


def test_a_phase_that_does_not_fit_is_refused_before_the_first_step(tiny_config, tiny_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(micro_batch, "device_memory", lambda device: 9e3)
    phase = dataclasses.replace(tiny_config.phases[0], accumulation=1)
    two = dataclasses.replace(tiny_config, phases=(phase, phase))
    with pytest.raises(UserError, match=r"phases\.1: .* accumulation 1 needs more .* of .* GiB\): leave out phases\.1"):
        pretraining.pretrain(two, [CorpusWeight(tiny_corpus)], tmp_path / "run", make_programs=FakePrograms)
    assert not (tmp_path / "run" / "checkpoints").exists() or not any((tmp_path / "run" / "checkpoints").iterdir())


def test_every_device_and_every_size_of_a_ramp_has_whole_micro_batches():
    assert PHASE.valid_accumulations(1) == [1, 2, 4, 8, 16] and PHASE.valid_accumulations(8) == [1, 2]
    assert RAMP.valid_accumulations(1) == [4, 8, 16] and RAMP.valid_accumulations(2) == [4, 8]
    assert Phase(batch_size=24).valid_accumulations(4) == [1, 2, 3, 6] and PHASE.valid_accumulations(3) == []


def test_a_number_is_taken_or_refused(mesh):
    assert [requested_accumulation(PHASE, 0, mesh, rows) for rows in (16, 8, 2, 1)] == [1, 2, 8, 16]
    assert [requested_accumulation(RAMP, 0, mesh, rows) for rows in (4, 1)] == [4, 16]
    assert requested_accumulation(RAMP, 0, mesh, None) == 4 and requested_accumulation(PHASE, 0, mesh, "auto") is None
    for phase, rows, fitting in (
        (PHASE, 3, "[1, 2, 4, 8, 16]"),
        (PHASE, 32, "[1, 2, 4, 8, 16]"),
        (RAMP, 8, "[1, 2, 4]"),
    ):
        with pytest.raises(UserError) as caught:
            requested_accumulation(phase, 1, mesh, rows)
        said = str(caught.value)
        assert f"--micro-batch {rows}" in said and "phases.1" in said and fitting in said and "\n" not in said


@pytest.fixture(scope="module")
def config(plain_config) -> Config:
    """Four steps of 64 rows, so that activations need more memory than parameters."""
    phase = dataclasses.replace(plain_config.phases[0], steps=4, batch_size=64, warmup_steps=0)
    return dataclasses.replace(
        plain_config,
        phases=(phase,),
        checkpoint=CheckpointConfig(every=2, keep=2),
    )


@pytest.mark.slow
def test_runs_agree_whatever_the_micro_batch(config, train, tmp_path, monkeypatch):
    """Whole batches; what --micro-batch says; what fits into less memory than a whole batch needs."""

    def run(workdir, micro_batch):
        return train(config, workdir, micro_batch=micro_batch)

    give_memory(monkeypatch, 1e15)
    run(tmp_path / "whole", "auto")
    (whole,) = Ledger(tmp_path / "whole" / "ledger.jsonl").entries_of("micro_batch")
    assert whole["accumulation"] == 1
    run(tmp_path / "number", 8)
    assert not Ledger(tmp_path / "number" / "ledger.jsonl").entries_of("micro_batch")
    assert_close(numbers(tmp_path / "number"), numbers(tmp_path / "whole"))
    assert [line["loss"] for line in numbers(tmp_path / "number")[:-1]] != [
        line["loss"] for line in numbers(tmp_path / "whole")[:-1]
    ], "the programs should differ"

    give_memory(monkeypatch, whole["bytes"] - 1)
    decide, cut = Ledger.make_decision, tmp_path / "cut"

    def decide_and_die(self, event, make):
        if decide(self, event, make) is not None:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "make_decision", decide_and_die)
        with pytest.raises(Killed):
            run(cut, "auto")
    # The decision is there before the first step. It is not made again, whatever memory there is then.
    (entry,) = Ledger(cut / "ledger.jsonl").entries_of("micro_batch")
    assert entry["accumulation"] > 1 and entry["bytes"] < whole["bytes"] and not numbers(cut)
    give_memory(monkeypatch, 0)
    run(cut, "auto")
    assert Ledger(cut / "ledger.jsonl").entries == [entry]
    assert_close(numbers(cut), numbers(tmp_path / "whole"))


MIB = 2.0**20


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {"memory.max": "5242880"}, 5 * MIB),
        ("0::/", {"memory.max": "max"}, None),
        ("0::/jobs/1", {"jobs/1/memory.max": "3145728", "jobs/memory.max": "max"}, 3 * MIB),
        ("0::/jobs/1", {"jobs/1/memory.max": "max", "jobs/memory.max": "2097152"}, 2 * MIB),
        ("0::/on/the/host", {"memory.max": "4194304"}, 4 * MIB),  # a container sees its own group as the root
        ("7:cpu:/a\n4:memory:/a", {"memory/a/memory.limit_in_bytes": "1048576"}, MIB),
        ("4:cpu,memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("4:memory:/a\n0::/", {"memory/memory.limit_in_bytes": "1048576"}, MIB),
        ("4:cpu:/a", {"memory/a/memory.limit_in_bytes": "1048576"}, None),
        (None, {"memory.max": "1048576"}, None),
    ],
)
def test_the_memory_of_a_host_is_bounded_by_its_control_groups(tmp_path, groups, limits, expected):
    files = {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    for name, text in (files | ({} if groups is None else {"proc/self/cgroup": groups})).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    whole = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    assert micro_batch.host_memory(tmp_path) == (expected or whole)


def test_available_memory_has_the_file_cache_and_is_bounded(tmp_path, monkeypatch):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    2048 kB\n")
    free = micro_batch._free_memory(tmp_path)
    assert free == 2 * MIB
    monkeypatch.setattr(micro_batch, "_free_memory", lambda: free)
    assert micro_batch.available_memory(jax.devices()[0]) == 2 * MIB
    monkeypatch.setattr(micro_batch, "host_memory", lambda: MIB)
    assert micro_batch.available_memory(jax.devices()[0]) == MIB
