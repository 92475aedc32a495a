"""Work directories: acquired once, continued by the same run, refused for every other run."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from bert_jax import config as config_lib
from bert_jax.config import Config, Phase
from bert_jax.data.manifest import FORMAT_VERSION, identity_of
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.storage.lock import DirectoryLock
from bert_jax.training import continuation, job, pretraining
from bert_jax.training.run_directory import checkpoint, commit, workdir
from tests.runs import assert_close, numbers

CONFIG = Config(name="x")
MIXTURE = {"ab12": 0.7, "cd34": 0.3}
PATHS = ["/books", "/wiki"]


def acquire_as_a_run(directory, config, mixture, paths, tokenizer_text):
    """As a run does that starts or continues."""
    before = workdir.matching_config(directory, config, mixture, paths)
    workdir.write_run_config(directory, before, config, mixture, paths, tokenizer_text)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_acquire_writes_the_identity_of_the_run(tmp_path):
    directory = tmp_path / "deep" / "run"
    acquire_as_a_run(directory, CONFIG, MIXTURE, PATHS, "{tokenizer}")
    assert contents(directory).keys() == {"config.json", "tokenizer.json", "ledger.jsonl"}
    assert (directory / "tokenizer.json").read_text() == "{tokenizer}"
    assert workdir.read_config(directory) == CONFIG
    described = json.loads((directory / "config.json").read_text())
    assert described["fingerprint"] == config_lib.fingerprint(CONFIG) and described["corpora"] == MIXTURE
    assert described["corpus_paths"] == PATHS


def test_the_same_run_changes_nothing(tmp_path):
    acquire_as_a_run(tmp_path, CONFIG, MIXTURE, PATHS, "t")
    (tmp_path / "ledger.jsonl").write_text("kept\n")
    before = contents(tmp_path)
    # Where it runs and how often it saves may change; so may the place of the same corpus.
    other = config_lib.replace(CONFIG, checkpoint={"every": 7}, mesh={"fsdp": 2}, model={"remat": "full"})
    acquire_as_a_run(tmp_path, other, MIXTURE, ["/moved", "/there"], "t")
    # So may the order they are named in, and what the stream rounds away.
    acquire_as_a_run(tmp_path, other, {"cd34": 0.30001, "ab12": 0.69999}, PATHS, "t")
    assert contents(tmp_path) == before


def test_a_run_from_before_a_field_goes_on(tmp_path):
    """A version that did not know a field wrote a config without it, and another fingerprint."""
    acquire_as_a_run(tmp_path, CONFIG, MIXTURE, PATHS, "t")
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["config"]["model"].pop("position_offset") == 0
    (tmp_path / "config.json").write_text(json.dumps(described | {"fingerprint": "0" * 64}))
    acquire_as_a_run(tmp_path, CONFIG, MIXTURE, PATHS, "t")
    with pytest.raises(UserError, match=r"model.position_offset 0 -> 2"):
        acquire_as_a_run(tmp_path, config_lib.replace(CONFIG, model={"position_offset": 2}), MIXTURE, PATHS, "t")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"num_layers": 6}}, "model.num_layers 12 -> 6"),
        ({"seed": 1}, "seed 0 -> 1"),
        ({"objective": {"pair": "none"}}, "objective.pair nsp -> none"),
        ({"optimizer": {"name": "lamb"}}, "optimizer.name adamw -> lamb"),
    ],
)
def test_another_config_is_refused(tmp_path, change, words):
    acquire_as_a_run(tmp_path, CONFIG, MIXTURE, PATHS, "t")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="holds a different run") as caught:
        acquire_as_a_run(tmp_path, config_lib.replace(CONFIG, **change), MIXTURE, PATHS, "t")
    assert words in str(caught.value) and "choose another --workdir" in str(caught.value)
    assert contents(tmp_path) == before


def test_other_weights_of_documents_are_refused(tmp_path, monkeypatch):
    """Names and scores of documents are not in the identity of a corpus."""

    def describe(*names):
        groups = [{"source": name, "language": "en", "score": None, "tokens": 9} for name in names]
        counts = {
            "documents": 2,
            "tokens": 18,
            "languages": {},
            "licenses": [],
            "filters": [],
            "masks": [],
            "removed": {},
        }
        described = {"ab12": {"name": "books", "groups": groups, **counts}}
        monkeypatch.setattr(workdir, "describe_corpora", lambda paths: described)

    config = config_lib.replace(CONFIG, data={"source_weights": (("a", 0.5),)})
    describe("a", "b")
    acquire_as_a_run(tmp_path, config, MIXTURE, PATHS, "t")
    describe("a", "other")
    acquire_as_a_run(tmp_path, config, MIXTURE, PATHS, "t")
    describe("b", "a")
    with pytest.raises(UserError, match="corpus books: its documents have other sources, languages or scores"):
        acquire_as_a_run(tmp_path, config, MIXTURE, PATHS, "t")


def test_other_phases_replace_those_that_were_there(tmp_path):
    acquire_as_a_run(tmp_path, CONFIG, MIXTURE, PATHS, "t")
    (tmp_path / "ledger.jsonl").write_text("kept\n")
    longer = dataclasses.replace(CONFIG, phases=CONFIG.phases * 2)
    assert workdir.matching_config(tmp_path, longer, MIXTURE, PATHS) == CONFIG
    acquire_as_a_run(tmp_path, longer, MIXTURE, PATHS, "other")
    assert workdir.read_config(tmp_path) == longer and workdir.read_run(tmp_path)["corpora"] == MIXTURE
    assert (tmp_path / "ledger.jsonl").read_text() == "kept\n" and (tmp_path / "tokenizer.json").read_text() == "t"


def phase(**values) -> Phase:
    return Phase(**{"steps": 10, "learning_rate": 1e-3, "warmup_steps": 3} | values)


STABLE = {"decay": "sqrt", "decay_start": 8}


@pytest.mark.parametrize(
    ("done", "old", "new", "words"),
    [
        # A run of `done` steps: what may follow them, and what may not.
        (10, [phase(decay="constant")], [phase(decay="constant", steps=99)], None),
        (10, [phase(decay="constant")], [phase(decay="constant"), phase(seq_len=256)], None),
        (10, [phase(decay="constant")], [phase(steps=15, decay="sqrt", decay_start=10)], None),
        (8, [phase(**STABLE)], [phase(decay="sqrt", decay_start=50, steps=60)], None),
        (4, [phase(**STABLE)], [phase(**STABLE, steps=9)], None),
        (10, [phase(decay="constant"), phase()], [phase(decay="constant"), phase(batch_size=8)], None),
        (9, [phase(**STABLE)], [phase(**STABLE, steps=11)], None),
        (10, [phase(**STABLE)], [phase(**STABLE, steps=11)], "the learning rate of step 10 was 0.000292893, not"),
        (
            10,
            [phase()],
            [phase(steps=20)],
            "phases.0.steps 10 -> 20.*the learning rate of step 4 was 0.0007, not 0.00085",
        ),
        (6, [phase(decay="constant")], [phase(decay="constant", steps=5)], "phases.0 had 6 steps, not 5"),
        (
            6,
            [phase(decay="constant")],
            [phase(decay="constant", warmup_steps=4)],
            "of step 2 was 0.000333333, not 0.00025",
        ),
        (6, [phase()], [phase(seq_len=256)], "phases.0.seq_len was 128, not 256"),
        (6, [phase()], [phase(end_mask_rate=0.1)], "phases.0.end_mask_rate was None, not 0.1"),
        (
            6,
            [phase(decay="constant", mask_rate=0.3, end_mask_rate=0.1)],
            [phase(decay="constant", mask_rate=0.3, end_mask_rate=0.1, steps=20)],
            "the mask rate of step 2 was 0.28, not 0.29",
        ),
        (12, [phase(), phase()], [phase()], "phases.1 is missing"),
        (12, [phase(decay="constant"), phase()], [phase(decay="constant", steps=11), phase()], "had 10 steps, not 11"),
    ],
)
def test_a_run_may_go_on_with_phases_that_keep_its_past(tmp_path, done, old, new, words):
    before, now = (dataclasses.replace(CONFIG, phases=tuple(phases)) for phases in (old, new))
    continuation.check_phase_changes(tmp_path, before, now)  # nothing is trained yet
    save = checkpoint.checkpoint_directory(tmp_path) / f"{done:08d}"
    save.mkdir(parents=True)
    cursor = {"step": done, "phase": before.locate_step(done)[0], "positions": [], "skipped": []}
    metadata = {"format_version": checkpoint.FORMAT_VERSION, "cursor": cursor, "ledger": []}
    (save / "run.json").write_text(json.dumps(metadata))
    commit.write_commit(save, commit.checksums_of_this_process(save))
    if words is None:
        continuation.check_phase_changes(tmp_path, before, now)
        return
    with pytest.raises(UserError, match=f"its {done} steps so far would not be the same: ") as caught:
        continuation.check_phase_changes(tmp_path, before, now)
    assert re.search(words, str(caught.value)) and f"--init-from {tmp_path}" in str(caught.value)


def test_the_config_is_read_after_the_lock_is_acquired(tiny_config, tiny_corpus, tiny_run, tmp_path, monkeypatch):
    """Another run may end, and leave other phases, while this one waits for the lock."""
    shutil.copytree(tiny_run, tmp_path / "run")
    path = tmp_path / "run" / "config.json"

    def acquire(lock):
        held = json.loads(path.read_text())
        held["config"]["phases"][0]["learning_rate"] /= 2
        path.write_text(json.dumps(held))

    monkeypatch.setattr(DirectoryLock, "acquire", acquire)
    with pytest.raises(UserError, match="steps so far would not be the same: the learning rate of step"):
        pretraining.pretrain(tiny_config, [CorpusWeight(tiny_corpus)], tmp_path / "run")


def test_lost_checkpoints(tiny_config, tiny_run, train, tmp_path, capfd):
    """As of an unmounted volume: nothing is changed without --restart, which has no effect on other runs."""
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    with pytest.raises(UserError, match=r"checkpoints has no checkpoint, and the run had saved one: .*add --restart"):
        train(tiny_config, run)
    assert contents(run) == before
    assert train(tiny_config, run, restart=True).cursor.step == tiny_config.total_steps
    assert "the run begins again at step 0" in capfd.readouterr().err
    assert_close(numbers(run), numbers(tiny_run))
    assert train(tiny_config, run, restart=True).cursor.step == tiny_config.total_steps
    err = capfd.readouterr().err
    assert f"continuing from step {tiny_config.total_steps}" in err and "begins again" not in err


def test_a_start_before_the_first_checkpoint_needs_no_flag(tiny_config, tiny_run, train, tmp_path):
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    (run / "has_checkpoints").unlink()
    assert train(tiny_config, run).cursor.step == tiny_config.total_steps and (run / "has_checkpoints").exists()


def test_a_tokenizer_that_is_missing_is_restored(tiny_config, tiny_run, train, tmp_path, capfd):
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    (run / "tokenizer.json").unlink()
    train(tiny_config, run)
    assert (run / "tokenizer.json").read_bytes() == (tiny_run / "tokenizer.json").read_bytes()
    assert "tokenizer.json was missing: restored from" in capfd.readouterr().err
    (run / "tokenizer.json").unlink()
    data = job.RunData({}, ["/other"], "{}", "another")
    with pytest.raises(UserError, match=r"tokenizer.json is missing, and /other has another tokenizer: restore a copy"):
        job._restore_tokenizer(run, data)
    assert not (run / "tokenizer.json").exists()


@pytest.fixture
def places(tmp_path):
    """Directories with a corpus.json each, and their identities."""
    found = {}
    for name in ("books", "wiki", "news"):
        (tmp_path / name).mkdir()
        manifest = {"format_version": FORMAT_VERSION, "name": name, "tokenizer": {"fingerprint": name}, "vocab_size": 9}
        manifest |= {"splits": {}, "files": {}}
        (tmp_path / name / "corpus.json").write_text(json.dumps(manifest))
        found[name] = (identity_of(tmp_path, manifest), str(tmp_path / name))
    return found


def acquire(directory, places, shares):
    mixture = {places[name][0]: share for name, share in shares.items()}
    acquire_as_a_run(directory, CONFIG, mixture, [places[name][1] for name in shares], "t")


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        (
            {"books": 0.5, "news": 0.5},
            "holds a different run (corpora.{news} None -> 0.5; corpora.{wiki} 0.5 -> None): ",
        ),
        ({"wiki": 0.3, "books": 0.7}, "corpora.{books} 0.5 -> 0.7"),
    ],
)
def test_another_mixture_is_refused(tmp_path, places, shares, words):
    """In one line that says which corpora or shares differ, by where they lie."""
    acquire(tmp_path / "run", places, {"books": 0.5, "wiki": 0.5})
    before = contents(tmp_path / "run")
    with pytest.raises(UserError) as caught:
        acquire(tmp_path / "run", places, shares)
    assert words.format(**{name: path for name, (_, path) in places.items()}) in str(caught.value)
    assert "\n" not in str(caught.value) and "choose another --workdir" in str(caught.value)
    assert contents(tmp_path / "run") == before


def test_a_corpus_that_is_gone_is_named_by_its_identity(tmp_path):
    acquire_as_a_run(tmp_path, CONFIG, MIXTURE, PATHS, "t")
    with pytest.raises(UserError, match=r"corpora\.identity cd34 0\.3 -> None; corpora\.identity ef56 None -> 0\.3"):
        acquire_as_a_run(tmp_path, CONFIG, {"ab12": 0.7, "ef56": 0.3}, PATHS, "t")


def test_somebody_elses_files_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match="holds files, but no run of bert_jax"):
        acquire_as_a_run(tmp_path, CONFIG, MIXTURE, PATHS, "t")
    assert contents(tmp_path) == {"thesis.tex": b"years"}


@pytest.mark.parametrize("left", [(), ("tokenizer.json",), ("tokenizer.json", "ledger.jsonl", "config.json.f.partial")])
def test_files_of_a_killed_process_are_replaced(tmp_path, left):
    for name in left:
        (tmp_path / name).write_text("ha")
    acquire_as_a_run(tmp_path, CONFIG, MIXTURE, PATHS, "t")
    assert workdir.read_config(tmp_path) == CONFIG
    assert (tmp_path / "tokenizer.json").read_text() == "t" and not (tmp_path / "config.json.f.partial").exists()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot write to work directory .*: choose another --workdir"):
        acquire_as_a_run(tmp_path / "file" / "run", CONFIG, MIXTURE, PATHS, "t")
    with pytest.raises(UserError, match="is a file: choose another --workdir"):
        acquire_as_a_run(tmp_path / "file", CONFIG, MIXTURE, PATHS, "t")


OLDER = json.dumps({"config": config_lib.to_dict(CONFIG), "fingerprint": "", "corpora": ["ab12"], "corpus_paths": []})


@pytest.mark.parametrize("text", ["", "{", "[]", OLDER, '{"config": {"name": 3, "modle": {}}}'])
def test_a_damaged_config_is_reported(tmp_path, text):
    acquire_as_a_run(tmp_path, CONFIG, MIXTURE, PATHS, "t")
    (tmp_path / "config.json").write_text(text)
    for use in (lambda: workdir.read_config(tmp_path), lambda: acquire_as_a_run(tmp_path, CONFIG, MIXTURE, PATHS, "t")):
        with pytest.raises(UserError, match=r"config\.json"):
            use()


def test_a_file_that_is_renamed_meanwhile_is_not_missed(tmp_path, monkeypatch):
    """run.lock is written by a thread of the same process."""
    monkeypatch.setattr(workdir, "_partial_files", lambda directory: {"run.lock.f.partial"})
    acquire_as_a_run(tmp_path, CONFIG, MIXTURE, PATHS, "t")
    assert workdir.read_config(tmp_path) == CONFIG
