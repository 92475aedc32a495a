"""Copies of the state on the disk of a host: what was copied comes back, bit for bit, and only into its own run."""

import dataclasses
import json
import os
import re
import shutil
import struct
import time

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, RecoveryConfig
from bert_jax.errors import UserError
from bert_jax.training.run_directory import local_copies
from bert_jax.training.run_directory.local_copies import NAME, LocalCopies
from bert_jax.training.run_directory.process_state import file_parts, read_file
from tests.runs import Killed, assert_same_run, committed, spoil


def state_of(step: int) -> dict:
    """Arrays of several types, of which one leaves the next ones unaligned."""
    table = np.random.default_rng(step).normal(size=(8, 6)).astype(np.float32)
    state = {
        "a": np.array([True, False, True]),
        "step": np.int32(step),
        "table": table,
        "half": table.astype(jnp.bfloat16),
    }
    return jax.tree.map(jnp.asarray, state)


def abstract(metadata: dict) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))


def files(directory) -> list:
    return sorted(file for file in directory.rglob("*") if NAME.fullmatch(file.name))


@pytest.fixture
def copies(tmp_path):
    (tmp_path / "run").mkdir()
    with LocalCopies(str(tmp_path / "local"), 2, tmp_path / "run", "a config") as copies:
        yield copies


def restore(copies, after=0, is_valid=lambda metadata: True):
    return copies.restore_newest(after, abstract, is_valid)


def test_the_newest_comes_back_bit_for_bit(copies, tmp_path):
    assert restore(copies) is None
    for step in (2, 4):
        copies.save(step, state_of(step), {"note": step})
    copies.wait()
    assert [file.name[:8] for file in files(tmp_path)] == ["00000004"], "the older copy is deleted"
    state, metadata = restore(copies)
    assert metadata["note"] == 4
    for name, array in state_of(4).items():
        assert state[name].sharding == array.sharding and state[name].dtype == array.dtype
        assert np.asarray(state[name]).tobytes() == np.asarray(array).tobytes()
    assert restore(copies, after=4) is None, "the checkpoint is as new"
    assert restore(copies, is_valid=lambda metadata: metadata["note"] != 4) is None


def test_the_buffer_is_a_copy(copies):
    """The step may overwrite the arrays while the copy is written."""
    state = state_of(2)
    copies.save(2, state, {})
    deleted = jax.jit(lambda x: jax.tree.map(lambda y: ~y if y.dtype == bool else y + 1, x), donate_argnums=0)(state)
    jax.block_until_ready(deleted)
    copies.wait()
    np.testing.assert_array_equal(restore(copies)[0]["table"], state_of(2)["table"])


def raise_memory_error(file):
    raise MemoryError


def test_damage_is_noticed(copies, tmp_path, monkeypatch, capsys):
    copies.save(2, state_of(2), {})
    copies.wait()
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    for position in (0, 35, 60, len(whole) - 1):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert read_file(file) is None and restore(copies) is None
        assert capsys.readouterr().err == f"warning: local copy {file} is damaged; trying another one\n"
    for cut in (0, 20, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert restore(copies) is None
    for body in (
        b"",
        b"\xff" * 99,
        b"\0" * 7 + b"\x02[[",
        b"\0" * 7 + b"\x02[]",
        b"\0" * 7 + b"\x02{}",
        b"\0" * 5 + b"\1\0\0" + b"[" * 2**16,
        b"\0" * 7 + b"\x1b" + b'{"fingerprint": "a config"}' + b"\0" * 9,
    ):  # with a right checksum
        file.write_bytes(struct.pack("!I", google_crc32c.value(body)) + body)
        assert restore(copies) is None
    with monkeypatch.context() as patch:
        patch.setattr(local_copies, "read_file", raise_memory_error)  # larger than the memory
        assert restore(copies) is None
    file.unlink()
    os.mkfifo(file)  # nothing to read, and no end
    assert restore(copies) is None
    file.unlink()
    file.write_bytes(whole)
    assert restore(copies) is not None


def test_older_copies_that_cannot_be_deleted_do_not_end_the_run(copies, tmp_path, monkeypatch):
    copies.save(2, state_of(2), {})
    copies.wait()
    older = copies._own / ("00000001-".ljust(41, "0") + "-9")
    older.mkdir()
    copies.save(4, state_of(4), {})
    copies.wait()
    older.rmdir()
    monkeypatch.setattr(local_copies, "announce_checkpoint", lambda: shutil.rmtree(tmp_path / "local"))
    copies.save(6, state_of(6), {})
    copies.wait()
    assert not files(tmp_path)


def test_a_damaged_run_id_is_replaced(tmp_path):
    (tmp_path / local_copies.RUN_ID).write_bytes(b"\xff")
    with LocalCopies(str(tmp_path / "local"), 2, tmp_path, "a config"):
        assert re.fullmatch("[0-9a-f]{32}", (tmp_path / local_copies.RUN_ID).read_text())


def test_another_config_and_another_run_find_nothing(copies, tmp_path):
    copies.save(2, state_of(2), {})
    copies.wait()
    (tmp_path / "other").mkdir()
    for workdir, config in (("run", "another config"), ("other", "a config")):
        with LocalCopies(str(tmp_path / "local"), 2, tmp_path / workdir, config) as others:
            assert restore(others) is None
    copies.clear()
    assert not files(tmp_path)


def test_a_full_disk_is_a_warning_and_a_deleted_directory_is_made_again(copies, tmp_path, monkeypatch, capsys):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(local_copies.Path, "replace", fail)
        for step in (2, 4):
            copies.save(step, state_of(step), {})
        copies.wait()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: no local copy of step 2: [Errno 28] No space left on device (process 0)")
    assert not [*tmp_path.glob("local/*/*/*")], "nothing half-written stays"
    shutil.rmtree(tmp_path / "local")
    copies.save(6, state_of(6), {})
    copies.wait()
    assert restore(copies)[0]["step"] == 6


def test_a_copy_that_another_process_lacks_is_deleted(copies, tmp_path, monkeypatch, capsys):
    """Else every later step would add one for as long as the other process has no space; the whole one stays."""
    copies.save(2, state_of(2), {})
    copies.wait()
    with monkeypatch.context() as patch:
        patch.setattr(local_copies, "all_gather", lambda name, value: [value, "its disk is full"])
        for step in (4, 6):
            copies.save(step, state_of(step), {})
        copies.wait()
    assert [path.name[:8] for path in files(tmp_path)] == ["00000002"]
    assert "its disk is full (process 1)" in capsys.readouterr().err


def test_a_copy_that_cannot_be_sent_is_not_used(copies, monkeypatch):
    class Refused:
        def send(self, *_):
            raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(copies, "_peers", Refused())
    monkeypatch.setattr(copies, "_find", lambda name: (local_copies.Path(__file__), None))
    problem = copies._fetch(["00000002-a"], [[]], {"00000002-a": 0})
    assert problem == "process 0 cannot send that of process 0 ([Errno 111] Connection refused)"
    monkeypatch.setattr(copies, "_peers", None)
    assert copies._fetch(["00000002-a"], [["00000002-a"]], {"00000002-a": 0}) == ""


@pytest.mark.parametrize(
    ("disks", "layouts", "receivers"),
    [
        ("abcd", "1234", [1, 2, 3, 0]),
        ("aabb", "1234", [2, 3, 0, 1]),
        ("aab", "123", [2, 2, 0]),
        ("abcd", "1212", [None] * 4),  # replicas
        ("aabb", "1122", [2, None, 0, None]),  # replicas on one host
        ("aaaa", "1234", [None] * 4),
    ],
)
def test_who_gets_a_copy(disks, layouts, receivers):
    assert [local_copies._receiver(list(disks), list(layouts), process) for process in range(len(disks))] == receivers


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"checkpoint.local_directory .*file cannot be written \(Not a directory\)"):
        LocalCopies(str(tmp_path / "file"), 2, tmp_path, "a config")
    with pytest.raises(UserError, match=r"checkpoint.local_directory gs://b is not on a host"):
        CheckpointConfig(local_directory="gs://b")


@pytest.fixture(scope="module")
def config(plain_config):
    return config_lib.replace(plain_config, checkpoint={"every": 4, "keep": 2, "local_every": 2})


@pytest.fixture(scope="module")
def undisturbed(config, train, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(config, workdir)
    return workdir


def test_a_killed_run_continues_from_its_local_copy(config, undisturbed, train, tmp_path, capsys):
    copied = config_lib.replace(config, checkpoint={"local_directory": str(tmp_path / "local")})
    run = tmp_path / "run"

    def kill(count, state):
        if count == 7:
            deadline = time.monotonic() + 60
            while [file.name[:8] for file in files(tmp_path / "local")] != ["00000006"]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            raise Killed
        return state

    with pytest.raises(Killed):
        train(copied, run, after_step=kill)
    assert committed(run) == [4]
    shutil.copytree(tmp_path / "local", tmp_path / "kept")
    (copy,) = files(tmp_path / "local")
    metadata, arrays = read_file(copy)
    later = {"event": "time"}
    for step, forged in enumerate(
        ({"phase": 99}, {"phase": -1}, {"cursor": None}, {"ledger": "abc"}, {"ledger": [later]}), 7
    ):
        parts = file_parts(metadata | forged, np.frombuffer(arrays, np.uint8))
        copy.with_name(f"{step:08d}{copy.name[8:]}").write_bytes(b"".join(parts))
    no_progress = file_parts({"fingerprint": metadata["fingerprint"]}, np.frombuffer(arrays, np.uint8))
    copy.with_name(f"00000012{copy.name[8:]}").write_bytes(b"".join(no_progress))
    train(copied, run)
    assert "continuing from step 6" in capsys.readouterr().err
    assert_same_run(run, undisturbed, config)
    assert not files(tmp_path / "local"), "the run has ended"
    # With --restart the run begins at step 0, whatever copies there are.
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(tmp_path / "kept", tmp_path / "local", dirs_exist_ok=True)
    train(copied, run, restart=True)
    assert "begins again at step 0" in (said := capsys.readouterr().err) and "continuing" not in said
    assert_same_run(run, undisturbed, config)


@pytest.mark.slow
def test_a_copy_from_before_a_rollback_is_not_used(config, train, tmp_path):
    """The loss of steps 9 and 10 is not finite: the run goes back to step 4, although it has a copy of step 6."""
    phase = dataclasses.replace(config.phases[0], steps=14)
    recovery = RecoveryConfig(max_skipped=2, stable_steps=3)
    config = dataclasses.replace(config, phases=(phase,), recovery=recovery)
    copied = config_lib.replace(config, checkpoint={"local_directory": str(tmp_path / "local")})
    for name, one in (("plain", config), ("copied", copied)):
        train(one, tmp_path / name, change_task=spoil(64, 80, float("nan")))
        (entry,) = map(json.loads, (tmp_path / name / "ledger.jsonl").read_text().splitlines())
        assert entry["to"] == 4
    assert_same_run(tmp_path / "copied", tmp_path / "plain", config)
