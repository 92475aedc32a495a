"""Checkpoints: what was saved comes back, and damage never goes unnoticed."""

import errno
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from bert_jax.errors import UserError
from bert_jax.training.run_directory import checkpoint, commit, orbax_errors
from bert_jax.training.run_directory.checkpoint import (
    HAS_CHECKPOINTS,
    Checkpoints,
    newest_intact,
    newest_with_metadata,
    restore_parts,
)
from bert_jax.training.run_directory.commit import COMMIT_MARKER, find_damage

METADATA = {"cursor": {"step": 3}, "note": "x"}


def state_of(step: int):
    rng = np.random.default_rng(step)
    params = {"encoder": {"kernel": jnp.asarray(rng.normal(size=(7, 33)), jnp.float32)}, "bias": jnp.arange(5.0) * step}
    return {"step": jnp.int32(step), "params": params, "optimizer": jax.tree.map(lambda x: x / 3, params)}


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    """Two checkpoints, of steps 2 and 4."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(directory, keep=3) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, state_of(step), METADATA | {"step": step})
    return directory


@pytest.fixture
def saved(saved_once, tmp_path):
    return shutil.copytree(saved_once, tmp_path / "checkpoints")


def all_files(directory: pathlib.Path) -> list[str]:
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())


def restore(directory):
    with Checkpoints(directory, keep=3) as checkpoints:
        return checkpoints.restore_newest(lambda metadata: ABSTRACT)


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_the_newest_comes_back_bit_for_bit(saved, capsys):
    state, metadata = restore(saved)
    assert_equal(state, state_of(4))
    assert metadata == {"format_version": 6, "step": 4, **METADATA}
    assert capsys.readouterr().err == ""


def test_nothing_saved_is_none(tmp_path):
    assert restore(tmp_path / "none") is None
    (tmp_path / "empty").mkdir()
    assert restore(tmp_path / "empty") is None


def test_parameters_alone(saved):
    shapes = jax.eval_shape(lambda: state_of(0)["params"])
    params = restore_parts(newest_intact(epath.Path(saved)), {"params": shapes})["params"]
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))
    assert_equal(params, jax.tree.map(np.asarray, state_of(4)["params"]))


def test_retention_counts_only_complete_ones(tmp_path):
    """What a killed save left behind, even of a later step, is no checkpoint and goes with the next commit."""
    (tmp_path / "00000005" / "state").mkdir(parents=True)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, state_of(step), METADATA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000004"]
    assert restore(tmp_path)[1]["cursor"] == {"step": 3}


def test_a_checkpoint_of_a_stop_takes_no_place_of_another(tmp_path):
    """A run that was stopped keeps what an undisturbed one keeps."""
    with Checkpoints(tmp_path, keep=3, every=2) as checkpoints:
        kept = []
        for step in (2, 3, 4, 6, 7):
            checkpoints.save(step, state_of(step), METADATA)
            kept.append(checkpoints.steps())
    assert kept == [[2], [3, 2], [4, 2], [6, 4, 2], [7, 6, 4]]


def test_checkpoints_at_multiples_of_keep_every_stay(tmp_path):
    with Checkpoints(tmp_path, keep=1, every=2, keep_every=4) as checkpoints:
        for step in (2, 4, 6, 8, 9, 10):
            checkpoints.save(step, state_of(step), METADATA)
        assert checkpoints.steps() == [10, 8, 4]


def test_what_users_put_beside_checkpoints_is_theirs(tmp_path):
    """A note is no checkpoint and is not removed; nor is a copy under another name the newest."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(2, state_of(2), METADATA)
        checkpoints.wait()
        (tmp_path / "notes.txt").write_text("mine")
        for name in ("best", "3", "2026", "0002", "20261126", "٣"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "figure.png").write_text("mine")
        (tmp_path / "best" / COMMIT_MARKER).write_text("{}")
        checkpoints.save(4, state_of(4), METADATA)
        checkpoints.wait()
        (tmp_path / "00000006").mkdir()
        (tmp_path / "00000006" / "figure.png").write_text("mine")
        with pytest.raises(UserError, match=r"00000006 is needed for a checkpoint, and has other files"):
            checkpoints.save(6, state_of(6), METADATA)
    own = ["0002", "00000004", "00000006", "2026", "20261126", "3", "best", "notes.txt", "٣"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(own)
    assert len(list(tmp_path.glob("*/figure.png"))) == 7
    assert [path.name for path in checkpoint.committed_checkpoint_paths(epath.Path(tmp_path))] == ["00000004"]


def test_the_commit_comes_last(tmp_path, monkeypatch):
    """When it is written, every file that it vouches for is there already, and later none is added."""
    there, original = [], checkpoint.write_commit

    def spy(directory, *rest):
        there.append(set(all_files(pathlib.Path(directory))))
        original(directory, *rest)

    monkeypatch.setattr(checkpoint, "write_commit", spy)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state_of(1), METADATA)
    (before,) = there
    target = tmp_path / "00000001"
    assert COMMIT_MARKER not in before and set(all_files(target)) == before | {COMMIT_MARKER} and len(before) > 3
    assert json.loads((target / COMMIT_MARKER).read_text())["sha256"].keys() == before


def test_saving_again_replaces_an_unfinished_save(saved):
    (saved / "00000004" / COMMIT_MARKER).unlink()
    (saved / "00000004" / "leftover").write_text("half")
    with Checkpoints(saved, keep=3) as checkpoints:
        checkpoints.save(4, state_of(40), METADATA)
    assert_equal(restore(saved)[0], state_of(40))
    assert not (saved / "00000004" / "leftover").exists()


def largest(directory):
    return max(
        (directory / name for name in all_files(directory) if name != COMMIT_MARKER),
        key=lambda path: path.stat().st_size,
    )


def flip(directory):
    path = largest(directory)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    return f"{path.relative_to(directory).as_posix()} has changed"


def remove(directory):
    path = largest(directory)
    path.unlink()
    return f"{path.relative_to(directory).as_posix()} is missing"


def add(directory):
    (directory / "state" / "more").write_text("x")
    return "state/more was added later"


def cut_commit(directory):
    path = directory / COMMIT_MARKER
    path.write_text(path.read_text()[:-30])
    return f"{COMMIT_MARKER} is incomplete"


@pytest.mark.parametrize("damage", [flip, remove, add, cut_commit])
def test_damage_is_noticed_and_passed_over(saved, capsys, damage):
    newest = saved / "00000004"
    what = damage(newest)
    assert find_damage(epath.Path(newest)) == what
    state, metadata = restore(saved)
    assert metadata["step"] == 2
    assert_equal(state, state_of(2))
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"warning: checkpoint {newest} is damaged ({what}); trying the one before"


def test_a_flipped_bit_in_any_file_is_noticed(saved):
    newest = saved / "00000004"
    names = [name for name in all_files(newest) if name != COMMIT_MARKER]
    assert len(names) > 3
    for name in names:
        path = newest / name
        whole = path.read_bytes()
        if not whole:
            continue
        path.write_bytes(bytes([whole[0] ^ 128]) + whole[1:])
        assert find_damage(epath.Path(newest)) == f"{name} has changed"
        path.write_bytes(whole)
    assert find_damage(epath.Path(newest)) is None


def test_all_damaged_is_the_users_to_decide(saved, capsys):
    for step in ("00000002", "00000004"):
        flip(saved / step)
    with pytest.raises(UserError, match=r"every checkpoint is damaged; restore a copy, or start in another --workdir"):
        restore(saved)
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(("version", "remedy"), [(5, "use the version that wrote it"), (7, "update bert_jax")])
def test_other_formats_are_refused(saved, version, remedy):
    newest = saved / "00000004"
    metadata = json.loads((newest / "run.json").read_text())
    (newest / "run.json").write_text(json.dumps(metadata | {"format_version": version}))
    commit.write_commit(epath.Path(newest), commit.checksums_of_this_process(epath.Path(newest)))
    with pytest.raises(UserError, match=f"has format version {version}, and this bert_jax reads 6: {remedy}"):
        restore(saved)


def test_a_good_checkpoint_outlives_newer_ones(tmp_path):
    """Beyond `keep` stay the newest good one, and the one that will be good next."""
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step, good, left in (
            (1, 0, [1]),
            (2, 0, [2, 1]),
            (3, 0, [3, 2, 1]),
            (4, 0, [4, 3, 1]),
            (5, 2, [5, 4, 3, 1]),
        ):
            checkpoints.save(step, state_of(step), METADATA, good)
            assert checkpoints.steps() == left
        checkpoints.delete([1, 5])
        assert checkpoints.steps() == [4, 3]


def test_a_failed_save_is_not_silent(tmp_path, monkeypatch):
    def fail(directory, written):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "write_commit", fail)
    with pytest.raises(OSError, match="disk full"), Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state_of(1), METADATA)
    assert restore(tmp_path) is None


FILL_UP = """
import sys
from pathlib import Path
import jax
from bert_jax.errors import UserError
from bert_jax.training.run_directory.checkpoint import Checkpoints, committed_checkpoint_paths
from bert_jax.training.run_directory.commit import find_damage

directory = Path(sys.argv[1])
noise = jax.random.normal(jax.random.key(0), (1_000_000,))  # which nothing compresses
state, saved, refused = {"params": {"kernel": noise}}, 0, ""
try:
    with Checkpoints(directory, keep=99) as checkpoints:
        for step in range(1, 9):
            checkpoints.save(step, state, {"step": step})
            checkpoints.wait()
            saved = step
except UserError as error:
    refused = str(error)
left = sorted(path.name for path in directory.iterdir())
assert 0 < saved < 8, saved
assert left == [f"{step:08d}" for step in range(1, saved + 1)], left
assert not any(find_damage(save) for save in committed_checkpoint_paths(directory))
print(refused)
"""


@pytest.mark.slow
def test_a_disk_that_is_full_after_a_commit(tmp_path, monkeypatch):
    """The checkpoint is complete: the save succeeds, and the next one writes the marker."""
    write, full = checkpoint.write_atomic, [True]

    def write_unless_full(path, data):
        if path.name == HAS_CHECKPOINTS and full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_atomic", write_unless_full)
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        checkpoints.save(2, state_of(2), METADATA)
        assert checkpoints.steps() == [2] and not (tmp_path / HAS_CHECKPOINTS).exists()
        full.clear()
        checkpoints.save(4, state_of(4), METADATA)
        assert checkpoints.steps() == [4, 2] and (tmp_path / HAS_CHECKPOINTS).exists()


@pytest.mark.parametrize(
    ("damaged", "step"),
    [
        ((), 4),
        (("00000004/run.json",), 2),
        (("00000004/COMMIT.json",), 2),
        (("00000004/state/_METADATA",), 4),  # only the metadata is read
        (("00000004/run.json", "00000002/run.json"), None),
    ],
)
def test_metadata_of_a_damaged_checkpoint_is_not_used(saved, damaged, step):
    for name in damaged:
        (saved / name).write_bytes(b"[" + (saved / name).read_bytes()[1:])
    found = newest_with_metadata(epath.Path(saved))
    assert (None if found is None else int(found.name)) == step


def test_a_full_disk(tmp_path):
    """A real one, of 12 MB. Saves are of 4 MB at most; those that were committed stay."""
    script = tmp_path / "fill_up.py"
    script.write_text(FILL_UP)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=12m tmpfs {disk}"
    own = [] if os.geteuid() == 0 else ["--map-root-user"]
    if subprocess.run(["unshare", *own, "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    fill = f"{mount} && exec {sys.executable} {script} {disk}/checkpoints"
    done = subprocess.run(["unshare", *own, "--mount", "sh", "-c", fill], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "No space left on device; free some space and run the same command again" in done.stdout
    assert "Traceback" not in done.stderr, "the line is not preceded by what Orbax logs"
    details = pathlib.Path(re.search(r"Details are in (.*\.log)$", done.stdout.strip())[1])
    assert "No space left on device" in details.read_text() and "Traceback" in details.read_text()
    details.unlink()


def test_errors_of_orbax_are_logged_if_no_line_describes_them(monkeypatch, caplog):
    """Those of other libraries and warnings at once."""

    def record(level: int, path: str) -> logging.LogRecord:
        return logging.LogRecord("absl", level, path, 1, f"{level} of {path}", (), None)

    errors, logger = orbax_errors.OrbaxErrorBuffer(), logging.getLogger("absl")
    monkeypatch.setattr(logger, "propagate", True)
    for each in (record(40, "/lib/orbax/x.py"), record(30, "/lib/orbax/x.py"), record(40, "/lib/grain/x.py")):
        logger.handle(each)
    assert caplog.messages == ["30 of /lib/orbax/x.py", "40 of /lib/grain/x.py"]
    errors.close()
    assert caplog.messages[2:] == ["40 of /lib/orbax/x.py"]
    logger.handle(record(40, "/lib/orbax/y.py"))
    assert caplog.messages[3:] == ["40 of /lib/orbax/y.py"]


def test_writes_that_end_after_another_has_failed_are_not_reported(monkeypatch):
    """With `ulimit -f`, TensorStore reported the closed event loop of every further file with a traceback."""
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    before, errors = sys.unraisablehook, orbax_errors.OrbaxErrorBuffer()
    closed, other = (
        types.SimpleNamespace(exc_type=type(error), exc_value=error)
        for error in (RuntimeError("Event loop is closed"), RuntimeError("x"))
    )
    sys.unraisablehook(closed)
    sys.unraisablehook(other)
    errors.close()
    assert reported == [other] and sys.unraisablehook == before
