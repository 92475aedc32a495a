"""Whose work directory it is: claimed once, continued by the same run, refused to every other."""

import dataclasses
import json

import pytest

from bert_jax import config as config_lib
from bert_jax.config import Config
from bert_jax.errors import UserError
from bert_jax.training import workdir

CONFIG = Config(name="x")
CORPORA = {"/corpus": "ab12"}


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_claim_writes_what_the_run_is(tmp_path):
    directory = tmp_path / "deep" / "run"
    workdir.claim(directory, CONFIG, CORPORA, "{tokenizer}")
    assert contents(directory).keys() == {"config.json", "tokenizer.json", "ledger.jsonl"}
    assert (directory / "tokenizer.json").read_text() == "{tokenizer}"
    assert workdir.read_config(directory) == CONFIG
    described = json.loads((directory / "config.json").read_text())
    assert described["fingerprint"] == config_lib.fingerprint(CONFIG) and described["corpora"] == ["ab12"]


def test_the_same_run_changes_nothing(tmp_path):
    workdir.claim(tmp_path, CONFIG, CORPORA, "t")
    (tmp_path / "ledger.jsonl").write_text("kept\n")
    before = contents(tmp_path)
    # Where it runs and how often it saves may change; so may the place of the same corpus.
    other = config_lib.replace(CONFIG, checkpoint={"every": 7}, mesh={"fsdp": 2}, model={"remat": "full"})
    workdir.claim(tmp_path, other, {"/moved": "ab12"}, "t")
    assert contents(tmp_path) == before


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
    workdir.claim(tmp_path, CONFIG, CORPORA, "t")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="holds a different run") as caught:
        workdir.claim(tmp_path, config_lib.replace(CONFIG, **change), CORPORA, "t")
    assert words in str(caught.value) and "choose another --workdir" in str(caught.value)
    assert contents(tmp_path) == before


def test_more_phases_are_another_run(tmp_path):
    workdir.claim(tmp_path, CONFIG, CORPORA, "t")
    with pytest.raises(UserError, match=r"phases\.1\.\w+ None -> "):
        workdir.claim(tmp_path, dataclasses.replace(CONFIG, phases=CONFIG.phases * 2), CORPORA, "t")


def test_another_corpus_is_refused(tmp_path):
    workdir.claim(tmp_path, CONFIG, CORPORA, "t")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"run on another corpus \(/corpus\)"):
        workdir.claim(tmp_path, CONFIG, {"/corpus": "cd34"}, "t")
    assert contents(tmp_path) == before


def test_somebody_elses_files_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match="holds files, but no run of bert_jax"):
        workdir.claim(tmp_path, CONFIG, CORPORA, "t")
    assert contents(tmp_path) == {"thesis.tex": b"years"}


@pytest.mark.parametrize("left", [(), ("tokenizer.json",), ("tokenizer.json", "ledger.jsonl", "config.json.new")])
def test_what_a_kill_left_of_a_claim_is_taken_over(tmp_path, left):
    for name in left:
        (tmp_path / name).write_text("ha")
    workdir.claim(tmp_path, CONFIG, CORPORA, "t")
    assert workdir.read_config(tmp_path) == CONFIG
    assert (tmp_path / "tokenizer.json").read_text() == "t" and not (tmp_path / "config.json.new").exists()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write to work directory"):
        workdir.claim(tmp_path / "file" / "run", CONFIG, CORPORA, "t")
    with pytest.raises(UserError, match="is a file: choose another --workdir"):
        workdir.claim(tmp_path / "file", CONFIG, CORPORA, "t")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"config": {"name": 3, "modle": {}}}'])
def test_a_damaged_config_is_said_to_be_one(tmp_path, text):
    workdir.claim(tmp_path, CONFIG, CORPORA, "t")
    (tmp_path / "config.json").write_text(text)
    for use in (lambda: workdir.read_config(tmp_path), lambda: workdir.claim(tmp_path, CONFIG, CORPORA, "t")):
        with pytest.raises(UserError, match=r"config\.json"):
            use()


def test_no_run_there(tmp_path):
    with pytest.raises(UserError, match=r"holds no run of bert_jax \(there is no config\.json\)"):
        workdir.read_config(tmp_path)
