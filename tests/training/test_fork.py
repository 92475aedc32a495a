"""A fork is its run up to the step where it begins, and another run with the same config from there."""

import dataclasses

import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig
from bert_jax.data.cursor import CorpusPosition, Cursor
from bert_jax.errors import UserError
from bert_jax.training.fork import parse_fork
from bert_jax.training.run_directory import checkpoint
from tests.runs import Killed, assert_same_arrays, final_state, kill_after


@pytest.fixture(scope="module")
def config(plain_config):
    """12 steps of a constant rate, an average, and a checkpoint every 4 steps."""
    constant = dataclasses.replace(plain_config.phases[0], steps=12, warmup_steps=2, decay="constant")
    config = config_lib.replace(plain_config, optimizer={"ema_decay": 0.3})
    return dataclasses.replace(config, phases=(constant,), checkpoint=CheckpointConfig(every=4, keep=5))


@pytest.fixture(scope="module")
def run(config, train, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("fork") / "run"
    train(config, workdir)
    return workdir


def forked(config, source, **changes):
    phase = dataclasses.replace(config.phases[0], **changes)
    return dataclasses.replace(config_lib.replace(config, start={"source": str(source)}), phases=(phase,))


def metadata_at(workdir, step) -> dict:
    return checkpoint.read_metadata(checkpoint.checkpoint_directory(workdir) / f"{step:08d}")


def cursor_at(workdir, step) -> Cursor:
    return Cursor.from_dict(metadata_at(workdir, step)["cursor"])


def test_a_fork_with_the_same_phases_ends_as_its_run(config, run, train, tmp_path, capsys):
    fork = forked(config, f"{run}@8")
    with pytest.raises(Killed):
        train(fork, tmp_path / "fork", after_step=kill_after(10))
    assert "continuing from step 8" in capsys.readouterr().err
    progress = train(fork, tmp_path / "fork")
    assert metadata_at(run, 12)["tokens_seen"] == progress.tokens_seen
    (before, _), (after, _) = (final_state(path, config) for path in (run, tmp_path / "fork"))
    assert before.average is not None
    assert_same_arrays(after, before)
    assert cursor_at(run, 12) == cursor_at(tmp_path / "fork", 12)


def test_another_decay_is_that_of_a_run_that_had_it_from_the_start(config, run, train, tmp_path):
    decay = {"decay": "sqrt", "decay_start": 8, "steps": 11}
    whole = dataclasses.replace(config, phases=(dataclasses.replace(config.phases[0], **decay),))
    train(whole, tmp_path / "whole")
    train(forked(config, f"{run}@8", **decay), tmp_path / "fork")
    expected, found = (final_state(tmp_path / name, whole)[0] for name in ("whole", "fork"))
    constant, _ = final_state(run, config)
    word = [np.asarray(state.params["encoder"]["embeddings"]["word"]) for state in (expected, constant)]
    assert (word[0] != word[1]).any()
    assert_same_arrays(found, expected)


def test_other_corpora_begin_and_known_ones_continue(config, run, train, tmp_path, second_corpus):
    for name, corpus in (("other", {"corpus": second_corpus}), ("same", {})):
        with pytest.raises(Killed):
            train(forked(config, f"{run}@4"), tmp_path / name, after_step=kill_after(5), **corpus)
    assert cursor_at(tmp_path / "other", 4).positions == (CorpusPosition(),)
    assert cursor_at(tmp_path / "same", 4) == cursor_at(run, 4) and cursor_at(run, 4).positions != (CorpusPosition(),)


def test_form(tmp_path):
    assert parse_fork(f"{tmp_path}/run@40") == (tmp_path / "run", 40)
    (tmp_path / "run@40").mkdir()
    assert [parse_fork(text) for text in (f"{tmp_path}/run@40", "run", "run@", "run@x", "@4")] == [None] * 5


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("run@5", {}, "has no checkpoint of step 5; it has 4, 8, 12"),
        ("nothing@8", {}, "holds no run"),
        ("model@8", {}, "model holds no run of bert_jax (its config.json is that of something else"),
        ("run@12", {}, "has done 12 steps, and the phases have 12: raise phases.N.steps"),
        ("run@8", {"steps": 9, "decay": "sqrt"}, "its 8 steps would not be the same: the learning rate of step 3"),
        ("run@8", {"seq_len": 48}, "its 8 steps would not be the same: phases.0.seq_len was 32, not 48"),
        ("run@8", {"seed": 1}, "has other settings (seed 0 -> 1)"),
        ("run@8", {"optimizer_state": "keep"}, "leave all other settings of start out"),
    ],
)
def test_bad_forks(config, run, train, tmp_path, source, changes, message):
    fields = {name: changes[name] for name in changes.keys() - {"seed", "optimizer_state"}}
    fork = forked(config, run.parent / source, **fields)
    fork = dataclasses.replace(fork, seed=changes.get("seed", 0))
    fork = config_lib.replace(fork, start={"optimizer_state": changes.get("optimizer_state", "new")})
    (run.parent / "model").mkdir(exist_ok=True)
    (run.parent / "model" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError) as caught:
        train(fork, tmp_path / "fork")
    assert message in str(caught.value) and "\n" not in str(caught.value) and not (tmp_path / "fork").exists()


def test_a_damaged_checkpoint(config, run, train, tmp_path):
    damaged = tmp_path / "run"
    (damaged / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "checkpoints/00000004/run.json", "checkpoints/00000004/COMMIT.json"):
        (damaged / name).parent.mkdir(exist_ok=True)
        (damaged / name).write_bytes((run / name).read_bytes())
    with pytest.raises(UserError, match="is damaged"):
        train(forked(config, f"{damaged}@4"), tmp_path / "fork")
