"""The checks of `bert-jax doctor`: each fires on the problem it is for, and is silent without a problem."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
from etils import epath

from bert_jax import config as config_lib
from bert_jax.chips import CHIPS
from bert_jax.config import Config, ObjectiveConfig, StartConfig
from bert_jax.config.presets import load_config, preset_files
from bert_jax.data.corpus import Corpus
from bert_jax.data.mixture import CorpusWeight, MixtureOrder
from bert_jax.distributed import shared_directory
from bert_jax.doctor import machine_checks, schedule_checks, storage_checks
from bert_jax.doctor.check_context import CheckContext, Machine
from bert_jax.doctor.doctor import CHECKS, RUN_CHECKS, DoctorOptions, check_run, run_checks
from bert_jax.planning.roofline import predict
from bert_jax.storage import lock
from bert_jax.storage.lock import LOCK_FILE, DirectoryLock
from bert_jax.training.run_directory.commit import COMMIT_MARKER
from bert_jax.training.run_directory.workdir import CONFIG
from tests.stores import memory_store

REPORT = {"host": "here", "config": {"seed": 0}, "code": {"hash": "a"}, "versions": {"jax": "1"}, "environment": {}}
DESCRIPTIVE = {"mixture", "time"}
"""Findings that only describe; a wrong mixture is an error when it is opened."""
TESTED_ELSEWHERE = {"coverage", "packing", "pairs", "epochs"}
"""Findings of `stream` whose warnings tests/doctor/test_doctor.py triggers with corpora of their own."""


def quiet(tiny: Config) -> Config:
    """A config without warnings."""
    config = config_lib.replace(
        tiny,
        model={"max_positions": 32},
        objective=ObjectiveConfig(pair="none"),
        data={"format": "full_sentences", "example_end": "row"},
        optimizer={"beta2": 0.9},
    )
    return phase(config, steps=20, learning_rate=1e-3)


def phase(config: Config, **changes) -> Config:
    return dataclasses.replace(config, phases=(dataclasses.replace(config.phases[0], **changes),))


def report_of(paths: list[Path], probe: str = "", **changes) -> dict:
    identities = {str(path): Corpus.open(path).identity for path in paths}
    probes = {"storage_probe": {"file": probe, "error": ""}, "local_probe": {"error": "", "free": 0}}
    return REPORT | {"corpora": identities} | probes | changes


@pytest.fixture
def context(tiny_config, tiny_corpus, tmp_path) -> CheckContext:
    """One process on one device, with a work directory that does not exist yet."""
    (tmp_path / "probe").write_text("")
    return CheckContext(
        quiet(tiny_config),
        [Corpus.open(tiny_corpus)],
        MixtureOrder([1.0]),
        Machine(1, 1, 1, 2.0**34, "one device"),
        (str(tiny_corpus),),
        tmp_path / "run",
        None,
        (report_of([tiny_corpus], str(tmp_path / "probe")),),
    )


def of(context: CheckContext, **changes) -> CheckContext:
    return dataclasses.replace(context, **changes)


def with_config(context: CheckContext, **changes) -> CheckContext:
    """With settings of config sections, as in `config.replace`; `phase` changes the only phase."""
    config = phase(context.config, **changes.pop("phase", {}))
    return of(context, config=config_lib.replace(config, **changes))


def schedule(context: CheckContext, **changes) -> CheckContext:
    return with_config(context, phase=changes)


def model(context: CheckContext, **changes) -> CheckContext:
    return with_config(context, model=changes)


def data(context: CheckContext, **changes) -> CheckContext:
    return with_config(context, data=changes)


def pairs(context: CheckContext, **changes) -> CheckContext:
    return data(context, format="segment_pair", example_end="sentence", **changes)


def machine(context: CheckContext, **changes) -> CheckContext:
    return of(context, machine=context.machine._replace(**changes))


def on_mesh(context: CheckContext, devices: int, **axes) -> CheckContext:
    return machine(with_config(context, mesh=axes), devices=devices)


def peer(context: CheckContext, **changes) -> CheckContext:
    return of(context, reports=(*context.reports, context.reports[0] | {"host": "there"} | changes))


def without_a_file(context: CheckContext) -> CheckContext:
    copy = context.workdir.parent / "broken"
    shutil.copytree(context.corpora[0].directory, copy)
    (copy / "features.json").unlink()
    return of(context, corpora=[Corpus.open(copy)])


def file_for_workdir(context: CheckContext) -> CheckContext:
    context.workdir.write_text("")
    return context


def other_files(context: CheckContext) -> CheckContext:
    context.workdir.mkdir()
    (context.workdir / "thesis.tex").write_text("")
    return context


def locked(context: CheckContext) -> CheckContext:
    """By this process's parent, which is alive."""
    owner = DirectoryLock(context.workdir)._owner | {"process": os.getppid()}
    context.workdir.mkdir()
    (context.workdir / LOCK_FILE).write_text(json.dumps(owner | {"started": lock._start_time(os.getppid())}))
    return context


def starting_from(context: CheckContext, source: str) -> CheckContext:
    return of(context, config=dataclasses.replace(context.config, start=StartConfig(source=source)))


def in_a_bucket(context: CheckContext, hosts: int) -> CheckContext:
    return of(context, workdir=memory_store() / "run", machine=context.machine._replace(hosts=hosts))


def probe(context: CheckContext, **changes) -> CheckContext:
    report = context.reports[0]
    return of(context, reports=(report | {"storage_probe": report["storage_probe"] | changes},))


def local(context: CheckContext, **changes) -> CheckContext:
    report = context.reports[0]
    report = report | {"local_probe": report["local_probe"] | changes}
    return of(with_config(context, checkpoint={"local_directory": "/copies"}), reports=(report,))


# Name of the finding, change that triggers it, level, and words of the text (with the remedy).
FIRES = [
    ("files", without_a_file, "error", ["features.json", "missing"]),
    ("vocabulary", lambda a: model(a, vocab_size=60), "error", ["set --model.vocab-size"]),
    (
        "rows",
        lambda a: schedule(a, batch_size=4096, steps=1, warmup_steps=0),
        "warning",
        ["less than one", "smaller batch"],
    ),
    ("local-copies", lambda a: local(a, error="cannot write"), "error", ["process 0 (here): cannot write"]),
    ("local-copies", local, "error", ["GiB needed, 0.00 GiB are free"]),
    ("held-out", lambda a: machine(a, hosts=13), "warning", ["13 hosts", "--evaluation.rows"]),
    ("rate", lambda a: schedule(a, learning_rate=0.1), "warning", ["x 0.0012", "Devlin", "lower --phases.0.l"]),
    ("settings", lambda a: schedule(a, warmup_steps=20), "warning", ["never reached", "lower --phases.0.warmup-steps"]),
    ("settings", lambda a: schedule(a, warmup_steps=0), "warning", ["starts at 0.001", "set --phases.0.warmup-steps"]),
    ("settings", lambda a: schedule(a, end_learning_rate=1.0), "warning", ["rises", "lower --phases.0.end-learning"]),
    ("settings", lambda a: schedule(a, decay_power=0.0), "warning", ["100% of the decay", "with power 1"]),
    ("settings", lambda a: schedule(a, decay_start=18), "warning", ["50% of the decay", "earlier decay-start"]),
    ("settings", lambda a: schedule(a, steps=9, warmup_steps=1), "warning", ["9 steps", "raise --phases.N.steps"]),
    ("settings", lambda a: model(a, max_positions=64), "warning", ["from 32 on", "set --model.max-positions 32"]),
    (
        "settings",
        lambda a: with_config(a, evaluation={"every": 21}, checkpoint={"every": 21}),
        "warning",
        ["20 steps", "evaluation.every 21, checkpoint.every 21:"],
    ),
    (
        "settings",
        lambda a: with_config(a, checkpoint={"every": 10, "keep_every": 30}),
        "warning",
        ["checkpoint.keep_every 30 has no effect: the run has 20 steps; lower it"],
    ),
    (
        "settings",
        lambda a: schedule(a, start_batch_size=4, ramp_steps=60, accumulation=2),
        "warning",
        ["20 steps end before", "4 rows, not 8", "--phases.0.ramp-steps"],
    ),
    ("settings", lambda a: data(a, mask_copies=9), "warning", ["9 has no effect on corpus (", "fewer copies"]),
    ("settings", lambda a: data(a, example_copies=1), "warning", ["full_sentences makes the same examples"]),
    ("settings", lambda a: pairs(a, mask_copies=1), "warning", ["draws new examples", "set --data.example-copies 1"]),
    (
        "settings",
        lambda a: pairs(a, example_copies=2, language_exponent=0.3),
        "warning",
        ["the 2 epochs of data.example_copies repeat", "than 1 / 2 are in none"],
    ),
    ("settings", lambda a: pairs(a, example_copies=9), "warning", ["data.example_copies 9 has no effect on corpus ("]),
    ("model", lambda a: model(machine(a, kind="cpu"), compute_dtype="bfloat16"), "warning", ["compute-dtype float32"]),
    (
        "model",
        lambda a: schedule(model(machine(a, kind="H200"), max_positions=64, compute_dtype="bfloat16"), seq_len=64),
        "warning",
        ["11 to 32 % less", "set --model.attention auto"],
    ),
    ("mesh", lambda a: machine(a, devices=3), "error", ["batch_size 8 is not divisible by 3"]),
    ("mesh", lambda a: on_mesh(a, 4, tensor=4), "error", ["does not divide the 2 attention heads"]),
    (
        "mesh",
        lambda a: model(machine(a, kind="TPU v4"), attention="cudnn", attention_dropout=0.0),
        "error",
        ["needs a GPU", "is a TPU v4"],
    ),
    ("mesh", lambda a: on_mesh(a, 6, fsdp=4), "error", ["does not fit 6 devices"]),
    ("mesh", lambda a: machine(on_mesh(a, 2, tensor=2), hosts=2), "error", ["mesh.tensor must not span processes"]),
    ("split", lambda a: model(on_mesh(a, 2, tensor=2), vocab_size=121), "warning", ["word", "121", "multiples"]),
    ("memory", lambda a: machine(a, memory=2.0**20), "warning", ["on each device", "split the model over more"]),
    (
        "memory",
        lambda a: machine(schedule(a, batch_size=10**6), kind="cpu", memory=2.0**34, most_memory=2.0**34),
        "error",
        ["needs about", "this host has 16.0 GiB", "set --micro-batch auto, or --phases.0.accumulation 16"],
    ),
    ("workdir", file_for_workdir, "error", ["is a file: choose another"]),
    ("workdir", other_files, "error", ["holds files, but no run"]),
    ("workdir", locked, "warning", [f"locked by process {os.getppid()} on ", "wait for its end"]),
    ("workdir", lambda a: probe(a, file="", error="cannot write to /x: Read-only"), "error", ["(here)", "another"]),
    ("workdir", lambda a: in_a_bucket(a, 2), "error", ["several processes write one checkpoint together"]),
    ("start", lambda a: starting_from(a, "/nowhere/run"), "error", ["/nowhere/run does not exist"]),
    ("workdir", lambda a: probe(a, file="/nowhere/probe"), "error", ["not the same directory", "shared file system"]),
    ("processes", lambda a: peer(a, config={"seed": 1}), "error", ["process 1 (there)", "config", "seed is 1"]),
    ("processes", lambda a: peer(a, corpora={a.paths[0]: "c" * 64}), "error", ["process 1 (there)", "corpora", "cccc"]),
]
BY_FREE_SPACE = {"disk"}
"""`test_disk` triggers it: it depends on the disk, not on the context."""


ON_MESH = {"split", "memory", "time"}
"""Findings of the check `mesh`."""


def findings_of(context: CheckContext, name: str):
    check = "stream" if name in {"rows", *TESTED_ELSEWHERE} else "mesh" if name in ON_MESH else name
    return [finding for finding in run_checks({check: CHECKS[check]}, context) if finding.name == name]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(shared_directory, "VISIBILITY_TIMEOUT_SECONDS", 0.0)


@pytest.mark.parametrize(("name", "change", "level", "words"), FIRES)
def test_it_fires(context, name, change, level, words):
    before = findings_of(context, name)
    assert before and {finding.level for finding in before} == {"ok"}
    fired = [finding for finding in findings_of(change(context), name) if finding.level != "ok"]
    assert fired and {finding.level for finding in fired} == {level}
    assert all(word in fired[0].text for word in words), fired[0].text
    assert "\n" not in fired[0].text and json.dumps(fired[0].values) is not None


def test_every_finding_is_ok_by_default_and_has_a_case_where_it_fires(context):
    findings = list(run_checks(CHECKS, context))
    assert [finding for finding in findings if finding.level != "ok"] == []
    assert {finding.name for finding in findings} == {
        name for name, *_ in FIRES
    } | DESCRIPTIVE | TESTED_ELSEWHERE | BY_FREE_SPACE
    assert all(json.loads(json.dumps(finding.values)) == finding.values for finding in findings)


def test_disk(context, monkeypatch):
    (calm,) = findings_of(context, "disk")
    # A parameter and its two moments, float32; tests/planning/test_estimates.py knows the number of parameters.
    size, keep = calm.values["checkpoint"], context.config.checkpoint.keep
    assert (
        size
        == 12
        * storage_checks.count_parameters(storage_checks.model_spec(context.config, -1), storage_checks.Sizes()).total
    )

    def level(free, changed=context):
        monkeypatch.setattr(storage_checks.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free))
        (finding,) = findings_of(changed, "disk")
        assert finding.level == "ok" or "keep fewer checkpoints" in finding.text
        return finding.level

    sizes = [
        (keep + 1) * size - 1,
        (keep + 1) * size,
        int(1.1 * (keep + 2) * size) - 9,
        int(1.1 * (keep + 2) * size) + 9,
    ]
    assert [level(free) for free in sizes] == ["error", "warning", "warning", "ok"]
    # Present checkpoints need no more space.
    for step in ("00000004", "00000008"):
        (context.workdir / "checkpoints" / step).mkdir(parents=True)
        (context.workdir / "checkpoints" / step / COMMIT_MARKER).write_text("{}")
    present = findings_of(context, "disk")[0].values["present"]
    assert (present, level((keep - 1) * size - 1), level(3 * size)) == (2, "error", "ok")
    for unchecked, reason in ((None, "give --workdir"), (epath.Path("gs://bucket/run"), "bucket cannot be checked")):
        (finding,) = findings_of(of(context, workdir=unchecked), "disk")
        assert finding.level == "ok" and reason in finding.text and finding.values["free"] is None


@pytest.mark.parametrize(
    ("hosts", "mesh", "states"),
    [(1, {}, 2), (4, {}, 2), (4, {"fsdp": 4}, 2), (4, {"fsdp": 8}, 1), (4, {"fsdp": 16}, 1)],
)
def test_space_for_local_copies(context, hosts, mesh, states):
    """16 devices. Two copies; and, if no other host has the same parts, two of another host."""
    (disk,) = findings_of(context, "disk")
    size = states * disk.values["checkpoint"]
    planned = with_config(machine(context, devices=16, hosts=hosts), mesh=mesh)
    for free, level in ((size - 1, "error"), (size, "ok")):
        (found,) = findings_of(local(planned, free=free), "local-copies")
        assert found.level == level


def test_processes_of_a_host_share_the_space_for_local_copies(context):
    planned = local(machine(context, devices=16, hosts=2))
    size = findings_of(planned, "local-copies")[0].values["size"]
    for hosts, level in ((("a", "b"), "ok"), (("a", "a"), "error")):
        probe = {"local_probe": {"error": "", "free": 2 * size - 1}}
        reports = tuple(context.reports[0] | probe | {"host": host} for host in hosts)
        assert findings_of(of(planned, reports=reports), "local-copies")[0].level == level


def test_a_checkpoint_with_an_average_is_a_third_larger(context):
    plain, averaged = (with_config(context, optimizer={"ema_decay": decay}) for decay in (None, 0.999))
    sizes = [findings_of(one, "disk")[0].values["checkpoint"] for one in (plain, averaged)]
    assert 3 * sizes[1] == 4 * sizes[0]


def test_a_run_continues_and_another_run_is_refused(context, tiny_config, tiny_run, tmp_path):
    here = of(context, config=tiny_config, workdir=tmp_path / "copy")
    shutil.copytree(tiny_run, here.workdir)
    before = (here.workdir / CONFIG).read_bytes()
    (finding,) = findings_of(here, "workdir")
    assert finding.level == "ok" and finding.values["holds_run"] and "will continue" in finding.text
    (finding,) = findings_of(of(here, config=dataclasses.replace(tiny_config, seed=1)), "workdir")
    assert finding.level == "error" and "seed 0 -> 1" in finding.text
    assert (here.workdir / CONFIG).read_bytes() == before


def test_micro_batches_are_those_that_fit(context):
    """A given number is kept; where the devices report their memory, or with `auto`, it is chosen as in `pretrain`."""
    context = schedule(context, batch_size=1024)
    (calm,) = findings_of(context, "memory")
    least = sum(machine_checks.estimate_memory(context.config, 0, machine_checks.Sizes(), 1024).values())
    scarce = machine(context, memory=(calm.values["needed"] + least) / 2)
    (finding,) = findings_of(scarce, "memory")
    assert finding.level == "warning" and "set --micro-batch auto" in finding.text
    fix = int(finding.text.split("--phases.0.accumulation ")[1].split(",")[0])
    (fixed,) = findings_of(schedule(scarce, accumulation=fix), "memory")
    assert fixed.level == "ok" and "found" not in fixed.text
    for changed in (of(scarce, micro_batch="auto"), machine(scarce, reports_memory=True)):
        (found,) = findings_of(changed, "memory")
        assert found.level == "ok" and found.values["accumulation"] == fix and "found at the start" in found.text
    (given,) = findings_of(schedule(machine(scarce, reports_memory=True), accumulation=1), "memory")
    assert given.level == "warning" and given.values["accumulation"] == 1


def test_a_cpu_computes_bfloat16_in_float32(context):
    """bert_base was estimated at 16.9 GiB, and its program needed 27."""
    context = of(context, config=config_lib.replace(load_config("bert_base")))
    (accelerator,), (cpu,) = (
        [one for one in findings_of(machine(context, kind=kind, memory=2.0**35), "memory") if one.values["phase"] == 0]
        for kind in ("", "cpu")
    )
    assert round(accelerator.values["needed"] / 2**30, 1) == 16.9 and round(cpu.values["needed"] / 2**30, 1) == 27.0


def test_one_device_is_described_without_a_mesh(context):
    """It is what a newcomer has."""
    (one,), (two, *_) = (findings_of(machine(context, devices=devices), "mesh") for devices in (1, 2))
    assert "fsdp" not in one.text and "fsdp 1" in two.text and one.values["fsdp"] == 1


def test_hours_are_those_of_the_roofline(context):
    """For the chosen micro-batches; None for an unknown device."""
    (unknown,) = findings_of(machine(context, kind="cpu"), "time")
    assert unknown.level == "ok" and unknown.values["hours"] is None and "kind cpu" in unknown.text
    (finding,) = findings_of(machine(context, kind="NVIDIA H100 80GB HBM3"), "time")
    step = predict(context.config, 0, machine_checks.Sizes(), 1, CHIPS["h100"]).step_seconds
    assert (
        finding.level == "ok"
        and finding.values["hours"] == pytest.approx(20 * step / 3600)
        and "estimate" in finding.text
    )


PUBLISHED = {512: 5 / (2**3 * 1e3), 4096: 1.76e-3, 8192: 5 / (2 * 1e3), 32_768: 5e-3}


@pytest.mark.parametrize(("batch", "rate"), PUBLISHED.items())
def test_lambs_reference_rate_equals_the_published_values(batch, rate):
    config = phase(config_lib.replace(load_config("bert_base"), optimizer={"name": "lamb"}), batch_size=batch)
    assert schedule_checks.reference_rate(config, config.phases[0]) == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("name", preset_files())
def test_shipped_schedules_give_no_warnings(name):
    findings = run_checks(schedule_checks.CHECKS, CheckContext(load_config(name), [], None))
    assert [str(finding) for finding in findings if finding.level != "ok"] == []


def test_without_corpora_the_run_is_still_checked(context, tiny_config):
    options = DoctorOptions(context.workdir)
    findings = list(check_run(tiny_config, [CorpusWeight(Path("/nowhere"))], options, context.machine, context.reports))
    assert (findings[0].level, findings[0].name) == ("error", "corpora")
    assert {finding.name for finding in findings[1:]} == {*machine_checks.CHECKS, *RUN_CHECKS, *ON_MESH}
