"""What happens outside a run: disks that fill up, checkpoints that are damaged, shards that vanish."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from bert_jax.data.mixture import CorpusWeight
from bert_jax.data.row_reader import CorpusRows
from bert_jax.errors import UserError
from bert_jax.inference import loaded_model
from bert_jax.training import pretraining


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Compiled like `tiny_run`, which runs are compared with."""


FILL_UP = """
import sys
from pathlib import Path
import jax
from bert_jax.errors import UserError
from bert_jax.training.run_directory.checkpoint import Checkpoints, committed_checkpoint_paths, find_damage

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


@pytest.mark.slow
def test_a_shard_that_vanishes(tiny_config, tiny_corpus, tiny_run, tiny_programs, tmp_path, monkeypatch):
    """While the run goes on; put back, the run goes on as if nothing had been."""
    corpus = Path(shutil.copytree(tiny_corpus, tmp_path / "corpus"))
    (shard,) = corpus.glob("*train*array_record*")
    whole, workdir, window = shard.read_bytes(), tmp_path / "run", CorpusRows.window

    def take_away(step, _):
        if step == 1:
            shard.write_bytes(b"")

    def window_read_anew(self, *place):
        self._windows.clear()
        return window(self, *place)

    def run(before_step=None):
        return pretraining.pretrain(
            tiny_config, [CorpusWeight(corpus)], workdir, make_programs=tiny_programs(before_step)
        )

    with monkeypatch.context() as patch:
        patch.setattr(CorpusRows, "window", window_read_anew)
        with pytest.raises(UserError, match=shard.name):
            run(take_away)
    with pytest.raises(UserError, match=shard.name):
        run()
    shard.write_bytes(whole)
    assert run().ended == "steps"
    runs = (loaded_model.load(w).params for w in (workdir, tiny_run))
    for a, b in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_array_equal(a, b)
