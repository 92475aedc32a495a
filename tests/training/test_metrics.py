"""metrics.jsonl, TensorBoard events and W&B's rows: appended while training, cut back on resume."""

import contextlib
import dataclasses
import errno
import json
import os
import sys
import types
from pathlib import Path

import pytest
from tensorboardX.proto import event_pb2

from bert_jax.config import CheckpointConfig
from bert_jax.errors import UserError
from bert_jax.training.run_directory.metrics import MetricsWriter, read_metrics
from tests.runs import Killed


def lines_to(path, steps, tail=""):
    text = "".join(
        json.dumps({"step": s, "split": "train", "loss": s / 10, "timing": {"unix": 1.0, "line": i}}) + "\n"
        for i, s in enumerate(steps, 1)
    )
    path.write_text(text + tail)


def steps_in(path):
    return [line["step"] for line in read_metrics(path)]


def read_events(directory):
    """(tag, step) -> value of all event files, read with nothing but the record format: length, crc, data, crc."""
    found = {}
    for path in directory.glob("events.*"):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            for value in event.summary.value:
                assert (value.tag, event.step) not in found
                found[value.tag, event.step] = value.simple_value
    return found


def test_lines_are_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path, 0, 2, tensorboard=False)
    writer.write(2, "train", {"loss": 1.5}, {"mfu": 0.25})
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line.pop("timing").keys() == {"unix", "line", "mfu"}
    assert line == {"step": 2, "split": "train", "loss": 1.5}
    writer.close()
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("damage", [{"timing": 5}, {"timing": {"unix": "now"}}, {"step": True}, {"split": 1}])
def test_a_line_with_values_of_other_types_is_left_out(tmp_path, damage, capfd):
    lines_to(tmp_path / "metrics.jsonl", [2, 4])
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    lines_to(tmp_path / "metrics.jsonl", [2, 4], json.dumps(line | damage) + "\n")
    assert steps_in(tmp_path / "metrics.jsonl") == [2, 4] and "line 3 is incomplete" in capfd.readouterr().err


def test_flush_puts_the_lines_and_the_name_of_the_file_on_the_disk(tmp_path, monkeypatch):
    """The loop flushes before a commit: after a power failure no checkpoint has fewer lines than steps."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    writer = MetricsWriter(tmp_path, 0, 2, tensorboard=False)
    writer.write(2, "train", {"loss": 1.5}, {})
    assert not synced
    writer.flush()
    assert synced == [tmp_path / "metrics.jsonl", tmp_path]
    writer.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_file_systems_that_cannot_put_a_directory_on_the_disk(tmp_path, monkeypatch, number):
    """Some network and FUSE file systems; a failing disk is an error."""

    def fsync(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    writer = MetricsWriter(tmp_path, 0, 0, tensorboard=False)
    writer.write(2, "train", {"loss": 1.5}, {})
    with pytest.raises(OSError, match="error") if number == errno.EIO else contextlib.nullcontext():
        writer.flush()


@pytest.mark.parametrize(
    ("kept", "count", "words"),
    [
        ([2, 4, 6], 3, None),
        ([], 0, None),
        ([2, 6], 3, "between 2 and 6"),
        ([4, 6], 3, "between 0 and 4"),
        ([2, 4], 3, "after 4"),
        ([], 3, "after 0"),
        ([2, 6, 8], 5, "between 2 and 6, after 8"),
    ],
)
def test_missing_lines_are_reported(tmp_path, capfd, kept, count, words):
    """At every start: the lines that follow are numbered as if none were missing."""
    lines_to(tmp_path / "metrics.jsonl", [2, 4, 6, 8])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[step // 2 - 1] for step in kept))
    writer = MetricsWriter(tmp_path, 12, count, tensorboard=False)
    err = capfd.readouterr().err
    assert (f"metrics.jsonl: lines of steps are missing ({words})" in err) if words else not err
    writer.write(14, "train", {}, {})
    writer.close()
    numbers = [line["timing"]["line"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert numbers == [*(step // 2 for step in kept), count + 1]


def test_lines_of_a_larger_log_every_are_not_missing(plain_config, train, tmp_path, capfd):
    """Without a line so far, the new value of log.every says nothing about the steps before."""

    def start(every: int, last: int) -> str:
        def kill(count, _):
            if count == last:
                raise Killed

        log, often = dataclasses.replace(plain_config.log, every=every), CheckpointConfig(every=2)
        with pytest.raises(Killed):
            train(dataclasses.replace(plain_config, log=log, checkpoint=often), tmp_path / "run", kill)
        return capfd.readouterr().err

    assert "missing" not in start(every=9, last=6) and not (tmp_path / "run" / "metrics.jsonl").exists()
    assert "missing" not in start(every=1, last=8)
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    assert "lines of steps are missing (after 5)" in start(every=3, last=8)


def test_events_are_written_and_written_again(tmp_path):
    writer = MetricsWriter(tmp_path, 0, 2, tensorboard=True)
    for step in (2, 4, 6):
        writer.write(step, "train", {"loss": step / 8, "bad": float("nan")}, {"mfu": 0.5})
        if step == 4:
            writer.write(4, "validation", {"mlm_loss": 3.0}, {})
    writer.close()
    directory = tmp_path / "tensorboard"
    expected = {("train/loss", s): s / 8 for s in (2, 4, 6)} | {("train/mfu", s): 0.5 for s in (2, 4, 6)}
    assert read_events(directory) == expected | {("validation/mlm_loss", 4): 3.0}

    resumed = MetricsWriter(tmp_path, 4, 2, tensorboard=True)
    resumed.write(6, "train", {"loss": 0.25}, {})
    resumed.close()
    del expected["train/mfu", 6]
    assert read_events(directory) == expected | {("train/loss", 6): 0.25, ("validation/mlm_loss", 4): 3.0}
    assert steps_in(tmp_path / "metrics.jsonl") == [2, 4, 4, 6]


def test_events_need_no_torch(tmp_path, monkeypatch):
    """tensorboardX would import it, which takes longer than all other imports of a run."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("tensorboardX", "torch"):
            monkeypatch.delitem(sys.modules, name)
    MetricsWriter(tmp_path, 0, 0, tensorboard=True).close()
    assert "tensorboardX" in sys.modules and "torch" not in sys.modules


def test_a_whole_run(tiny_run):
    lines = read_metrics(tiny_run / "metrics.jsonl")
    assert [(line["split"], line["step"]) for line in lines] == [
        ("train", 2),
        ("train", 4),
        ("validation", 4),
        ("train", 6),
        ("train", 8),
        ("validation", 8),
    ]
    train = lines[0]
    assert {"loss", "mlm_loss", "pair_loss", "learning_rate", "gradient_norm", "update_norm"} <= train.keys()
    assert {"tokens_per_second", "mfu", "step_seconds"} <= train["timing"].keys()
    events = read_events(tiny_run / "tensorboard")
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "split", "timing"):
                assert events[f"{line['split']}/{name}", line["step"]] == pytest.approx(value, rel=1e-6)


class FakeWandb(types.ModuleType):
    """What W&B keeps of a run over restarts, by id: rows by step, as its server merges them."""

    class Error(Exception):
        pass

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.inits, self.opened = {}, [], []

    def init(self, **arguments):
        self.inits.append(arguments)
        rows = self.runs.setdefault((arguments["project"], arguments["id"]), {})
        self.opened.append(FakeRun(rows))
        return self.opened[-1]


class FakeRun:
    def __init__(self, rows):
        self.rows, self.step, self.finished = rows, max(rows, default=-1) + 1, False

    def log(self, values, *, step):
        assert not self.finished and step >= self.step, "the real one would warn and drop it"
        self.step = step
        self.rows.setdefault(step, {}).update(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def write_some(workdir, resumed, steps, project="p"):
    writer = MetricsWriter(workdir, resumed, 2, tensorboard=False, wandb=project)
    for step in steps:
        writer.write(step, "train", {"loss": step / 8, "bad": float("nan")}, {"mfu": 0.5})
        if step % 4 == 0:
            writer.write(step, "validation", {"mlm_loss": step / 4}, {})
    writer.close()


def rows_of(steps):
    return {
        s: {"train/loss": s / 8, "train/mfu": 0.5} | ({"validation/mlm_loss": s / 4} if s % 4 == 0 else {})
        for s in steps
    }


def test_one_wandb_run_over_restarts(tmp_path, fake_wandb):
    """What was sent is not sent again, what the cut took away from the lines is made up for by what follows."""
    (tmp_path / "config.json").write_text(json.dumps({"config": {"seed": 3}}))
    write_some(tmp_path, 0, (2, 4, 6))
    write_some(tmp_path, 4, (6, 8))
    ((where, rows),) = fake_wandb.runs.items()
    assert where[0] == "p" and rows == rows_of((2, 4, 6, 8))
    assert [init["id"] for init in fake_wandb.inits] == [(tmp_path / "wandb_id").read_text()] * 2
    assert [init["config"] for init in fake_wandb.inits] == [{"seed": 3}] * 2
    assert {init["resume"] for init in fake_wandb.inits} == {"allow"}
    assert all(run.finished for run in fake_wandb.opened)
    assert steps_in(tmp_path / "metrics.jsonl") == [2, 4, 4, 6, 8, 8]


def test_wandb_gets_the_lines_that_it_has_not(tmp_path, fake_wandb):
    """A project that is named after a restart."""
    write_some(tmp_path, 0, (2, 4, 6), project=None)
    assert not fake_wandb.inits and not (tmp_path / "wandb_id").exists()
    write_some(tmp_path, 4, (6,))
    assert list(fake_wandb.runs.values()) == [rows_of((2, 4, 6))]


def test_wandb_is_missing(tmp_path, monkeypatch):
    lines_to(tmp_path / "metrics.jsonl", [2, 4])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'wandb"):
        MetricsWriter(tmp_path, 2, 2, tensorboard=False, wandb="p")
    assert steps_in(tmp_path / "metrics.jsonl") == [2, 4], "refused before anything is cut"
    MetricsWriter(tmp_path, 2, 2, tensorboard=False).close()
    assert steps_in(tmp_path / "metrics.jsonl") == [2]


def test_wandb_refuses(tmp_path, fake_wandb, monkeypatch):
    lines_to(tmp_path / "metrics.jsonl", [2, 4])

    def refuse(**arguments):
        raise fake_wandb.Error("api_key not configured (no-tty)\ncall wandb.login")

    monkeypatch.setattr(fake_wandb, "init", refuse)
    with pytest.raises(UserError, match=r"log\.wandb p: .*\(api_key not configured \(no-tty\)\): run `wandb login`"):
        MetricsWriter(tmp_path, 2, 2, tensorboard=False, wandb="p")
    assert steps_in(tmp_path / "metrics.jsonl") == [2, 4]
