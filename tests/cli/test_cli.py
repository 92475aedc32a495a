"""The commands of `bert-jax` on small runs: every user error is one line, exit code 2, and changes no file."""

import functools
import json
import os
import pathlib
import re
import shlex
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest
from etils import epath

from bert_jax.cli import main as cli
from bert_jax.config import to_dict
from bert_jax.data.corpus import Corpus
from bert_jax.doctor import machine_checks
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training import pretraining
from bert_jax.training.run_directory.checkpoint import FORMAT_VERSION
from bert_jax.training.run_directory.commit import checksums_of_this_process, write_commit
from tests.corpus_writer import CorpusWriter

ROOT = pathlib.Path(__file__).parents[2]
# The tiny config of the test session as a config file.
CONFIG_FILE = """
import json
from bert_jax.config import from_dict
def config():
    return from_dict(json.loads({text!r}))
"""


def snapshot(directory: pathlib.Path) -> dict[str, tuple]:
    """Every file with its size and the time of its last change, every directory."""

    def about(found: os.stat_result) -> tuple:
        return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else ()

    return {str(path): about(path.stat()) for path in directory.rglob("*")}


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory, tiny_corpus, second_corpus, other_corpus, tiny_run, tiny_export, tiny_config):
    """A directory with a config file, corpora, a finished run and its export; tests must not change it."""
    directory = tmp_path_factory.mktemp("cli")
    (directory / "tiny.py").write_text(CONFIG_FILE.format(text=json.dumps(to_dict(tiny_config))))
    (directory / "notes").mkdir()
    (directory / "notes" / "mine.txt").write_text("not a run")
    for name, source in (("corpus", tiny_corpus), ("other", other_corpus), ("run", tiny_run), ("export", tiny_export)):
        shutil.copytree(source, directory / name)
    for name, source in (("named", second_corpus), ("foreign", other_corpus)):
        shutil.copytree(source, directory / name)
        manifest = directory / name / "corpus.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"name": name}))
    for name in ("flipped", "cut", "retokenized"):
        shutil.copytree(tiny_corpus, directory / name)
    (shard,) = (directory / "flipped").glob("*-train.array_record-*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    (directory / "cut" / shard.name).write_bytes(content[:-100])
    shutil.copy(other_corpus / "tokenizer.json", directory / "retokenized")
    tokenizer = Tokenizer.load(tiny_corpus)
    for name, counts in (("short", {"train": 3, "validation": 1}), ("few", {"train": 1, "validation": 5})):
        with CorpusWriter(directory / name, name, tokenizer) as writer:
            for split in [split for split, count in counts.items() for _ in range(count)]:
                writer.add(split, np.arange(5, 15), np.array([5, 5]), text_bytes=9)
            writer.finish({"dropped": {}, "cleaned": {}, "skipped": {}, "settings": {}, "sources": [{"spec": "test"}]})
    shutil.copytree(tiny_run, directory / "damaged")
    for state in (directory / "damaged" / "checkpoints").glob("*/run.json"):
        state.write_text(state.read_text() + " ")
    return directory


@pytest.fixture
def cwd(sandbox, monkeypatch):
    """Change to `sandbox`, and check afterwards that no file in it was created, changed or touched."""
    monkeypatch.chdir(sandbox)
    before = snapshot(sandbox)
    yield sandbox
    assert snapshot(sandbox) == before


PRETRAIN = "pretrain tiny.py --corpus corpus --workdir new"
ADAPT = "run --phases.0.seq-len 32 --phases.0.batch-size 8 --corpus"
REMEDY = "copy the corpus again or rebuild it"
BAD = [
    # command line, parts of the error's line
    *[
        (f"pretrain tiny.py --workdir new --corpus {corpora.replace(' ', ' --corpus ')} {more}", parts)
        for corpora, more, parts in (
            ("nowhere", "", "nowhere ... no such corpus ... bert-data build"),
            ("short", "", "split 'validation' has 1 document(s) ... at least 2 ... so that each split has 2 or more"),
            ("few", "", "corpus few: split 'train' has 1 document(s), but  ... needs at least 2"),
            ("flipped", "", f"flipped/corpus-train ... damaged, its SHA-256 is not the recorded one; {REMEDY}"),
            ("cut", "--data.verify counts", f"damaged, it has  ... bytes where corpus.json lists  ... {REMEDY}"),
            ("retokenized", "", f"tokenizer.json is not the tokenizer that the corpus was built with ... {REMEDY}"),
            ("corpus ./corpus", "", "are the same corpus"),
            ("corpus other", "", "both named 'corpus' ... --name"),
            ("corpus=2 named", "", "has no weight ... give all of them a weight"),
            ("corpus=1 named=99999", "", "rounded to 0 of 10,000 ... give it more"),
            ("corpus=5e-324 named=1e308", "", "rounded to 0 of 10,000 ... give it more"),
            ("corpus foreign", "", "different tokenizers ... --tokenizer"),
        )
    ],
    (f"{PRETRAIN} --model.vocab-size 90", "token ids up to ... model.vocab_size is 90 ... set --model.vocab-size"),
    (f"{PRETRAIN[:-3]}run --seed 5", "run holds a different run ... seed 0 -> 5 ... choose another --workdir"),
    (f"{PRETRAIN[:-3]}notes", "notes holds files, but no run ... choose another --workdir"),
    (f"{PRETRAIN[:-3]}tiny.py/run", "cannot write to ... choose another"),
    *[
        (f"adapt {more} --workdir new", parts)
        for more, parts in (
            ("nowhere --corpus named --general corpus", "nowhere does not exist"),
            ("run --corpus named --general corpus", "phases.0.seq_len 128 is longer than the position table"),
            (f"{ADAPT} corpus --general ./corpus", "--general corpus is the same corpus as --corpus corpus"),
            (f"{ADAPT} named --general corpus=x", "--general corpus=x: there is no such directory ... as in --general"),
            (f"{ADAPT} foreign --general corpus", "different tokenizers ... --tokenizer"),
            (f"{ADAPT} corpus=2 --corpus named --general short", "has no weight ... give all of them a weight"),
            (f"{ADAPT} named --general corpus --start.source export", "--start.source: the run starts from MODEL"),
            (f"{ADAPT} named --general corpus --epochs 2 --phases.0.steps 3", "contradict each other"),
            (f"{ADAPT} named --general corpus --model.activation relu", "has model.activation gelu, this run relu"),
        )
    ],
    ("evaluate run --corpus other", "built with another tokenizer ... again with --tokenizer run/tokenizer.json"),
    ("evaluate run --corpus corpus --seq-len 65", "--seq-len is 65 ... from 8 to 64"),
    ("evaluate run --corpus corpus --rows 0", "--rows is 0 ... at least 1"),
    ("fill-mask run 'the river'", "no [MASK]"),
    (f"fill-mask export '[MASK] {'stone ' * 99}'", "position table 64 ... shorten"),
    ("fill-mask nowhere 'a [MASK]'", "nowhere does not exist"),
    ("convert notes new", "notes is not a run or a model"),
    ("merge run export --out new --seq-len 32", "--seq-len is that of scored rows: add --corpus DIR"),
    ("convert run notes", "notes exists already"),
]


@pytest.mark.parametrize(("line", "parts"), BAD, ids=[line[:90] for line, _ in BAD])
def test_errors_are_one_line(cwd, capfd, line, parts):
    assert cli.main(shlex.split(line)) == 2
    captured = capfd.readouterr()
    (message,) = captured.err.splitlines()
    assert message.startswith("error: ") and captured.out == "" and len(message) < 400
    assert all(part in message for part in parts.split(" ... ")), message


@pytest.mark.parametrize(
    ("preset", "gib", "advice"),
    [
        ("bert_medium", 8, "set --micro-batch auto, or --phases.0.accumulation 2, or train {}bert_small{}"),
        ("bert_large", 6, "or set --model.remat full, or train {}bert_base{}"),
        ("bert_mini", 2, "set --micro-batch auto, or --phases.0.accumulation 2, or train {}bert_tiny"),
    ],
)
def test_more_memory_than_the_host_has(cwd, capfd, monkeypatch, preset, gib, advice):
    """Refused by arithmetic, before anything is compiled or written; the system ended a run of bert_base."""
    monkeypatch.setattr(machine_checks, "host_memory", lambda: gib * 2.0**30)
    monkeypatch.setattr(machine_checks, "available_memory", lambda device: gib * 2.0**30)
    monkeypatch.setattr(pretraining, "pretrain", lambda *_, **__: pytest.fail("the run has begun"))
    assert cli.main(shlex.split(f"pretrain {preset} --corpus corpus --workdir new")) == 2
    (message,) = capfd.readouterr().err.splitlines()
    assert re.search(rf"^error: phase 0 needs about [0-9,.]+ GiB .* this host has {gib}\.0 GiB", message), message
    assert message.endswith(advice.format("a smaller model, such as the preset ", " with --micro-batch auto")), message


def test_memory_of_phases_that_are_over(cwd, capfd, monkeypatch, tmp_path):
    """A resumed run needs the memory of the phases that are left."""
    monkeypatch.setattr(machine_checks, "host_memory", lambda: 16.0 * 2**30)
    monkeypatch.setattr(machine_checks, "available_memory", lambda device: 16.0 * 2**30)
    monkeypatch.setattr(pretraining, "pretrain", lambda *_, **__: pytest.fail("the run has begun"))
    command = f"pretrain bert_base --corpus corpus --workdir {tmp_path}"
    for done in (899_999, 900_000):
        save = epath.Path(tmp_path) / "checkpoints" / f"{done:08d}"
        save.mkdir(parents=True)
        (save / "run.json").write_text(json.dumps({"format_version": FORMAT_VERSION, "cursor": {"step": done}}))
        write_commit(save, checksums_of_this_process(save))
        if done < 900_000:
            assert cli.main(shlex.split(f"{command} --phases.1.batch-size 2")) == 2
    assert "phase 0 needs about" in capfd.readouterr().err
    for last_phase in ("--phases.1.batch-size 2", "--phases.0.steps 899000 --phases.1.steps 1000"):  # left; done
        with pytest.raises(pytest.fail.Exception, match="has begun"):
            cli.main(shlex.split(f"{command} {last_phase}"))


def test_damaged_checkpoints(cwd, capfd, tmp_path):
    """One warning for each damaged checkpoint, then the error; training does not restart on top of them."""
    shutil.copytree("damaged", tmp_path / "run")
    before_training = snapshot(tmp_path / "run" / "checkpoints")
    pretrain = f"pretrain tiny.py --corpus corpus --workdir {tmp_path / 'run'}"
    for line in ("fill-mask damaged '[MASK]'", pretrain):
        assert cli.main(shlex.split(line)) == 2
        *before, message = capfd.readouterr().err.splitlines()
        assert message.startswith("error: ") and "every checkpoint is damaged" in message
        assert "restore a copy" in message
        warnings = [text for text in before if text.startswith("warning: checkpoint ")]
        assert len(warnings) == 2 and (warnings == before or line == pretrain)
    assert snapshot(tmp_path / "run" / "checkpoints") == before_training


@pytest.mark.slow
def test_batch_that_the_mesh_cannot_split(cwd):
    """In a new process with two devices: their number is fixed when jax starts."""
    arguments = [*PRETRAIN.split(), "--phases.0.batch-size", "9"]
    environment = dict(os.environ, JAX_NUM_CPU_DEVICES="2", JAX_PLATFORMS="cpu")
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "bert_jax", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: phases.0.batch_size 9 is not divisible by 2 row shards")
    assert line.endswith("use a multiple of 2")


def test_pretrain_a_file_with_overrides(sandbox, tmp_path, capsys, monkeypatch):
    """Flags override fields of the file; a repeated command finds the run finished."""
    monkeypatch.chdir(tmp_path)  # a relative --workdir
    arguments = ["pretrain", str(sandbox / "tiny.py"), "--corpus", str(sandbox / "corpus"), "--workdir", "run"]
    arguments += ["--phases.0.steps", "2", "--evaluation.every", "0"]
    arguments += ["--phases.0.learning-rate", "3e-3", "--objective.pair", "none", "--log.no-tensorboard"]
    arguments += ["--optimizer.clip-norm", "None", "--data.mask-copies", "3", "--evaluation.rows", "4"]
    arguments += ["--checkpoint.keep-every", "8"]
    arguments += ["--on-event", 'echo "$BERT_JAX_EVENT $BERT_JAX_STEP $BERT_JAX_EXIT_CODE" >> events']
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert "finished: 2 steps" in captured.out
    warnings = [line for line in captured.err.splitlines() if line.startswith("warning: ")]
    for words in (
        "set --data.example-copies 3 too",
        "the peak 0.003 is never reached",
        "fewer than checkpoint.every",
        "keep_every 8 has",
    ):
        assert len([line for line in warnings if words in line]) == 1, (words, warnings)
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert (config["phases"][0]["steps"], config["phases"][0]["learning_rate"]) == (2, 3e-3)
    assert (config["objective"]["pair"], config["optimizer"]["clip_norm"]) == ("none", None)
    assert (config["data"]["mask_copies"], config["log"]["tensorboard"], config["name"]) == (3, False, "tiny")
    assert config["phases"][0]["seq_len"] == 32  # from the file
    assert not (tmp_path / "run" / "tensorboard").exists()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert "finished: 2 steps" in captured.out and "continuing from step 2" in captured.err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "events").read_text().splitlines() == ["start 0 ", "end 2 0", "end 2 0"]


@pytest.mark.slow
def test_pretrain_and_evaluate_a_mixture(sandbox, second_corpus, tiny_programs, tmp_path, capsys, monkeypatch):
    """Shares are stored; the order of flags has no effect; other shares are refused."""
    monkeypatch.chdir(tmp_path)
    for name in ("pretrain", "evaluate"):
        shared = functools.partial(getattr(pretraining, name), make_programs=tiny_programs())
        monkeypatch.setattr(pretraining, name, shared)
    one, two = f"--corpus={sandbox / 'corpus'}", f"--corpus={second_corpus}"
    arguments = ["pretrain", str(sandbox / "tiny.py"), "--workdir", "run"]
    arguments += ["--phases.0.steps", "2", "--evaluation.rows", "4"]
    assert cli.main([*arguments, f"{one}=3", f"{two}=1"]) == 0
    shares = json.loads((tmp_path / "run" / "config.json").read_text())["corpora"]
    assert sorted(shares.values()) == [0.25, 0.75]
    assert shares[Corpus.open(second_corpus, "train").identity] == 0.25
    assert cli.main([*arguments, f"{two}=0.5", f"{one}=1.5"]) == 0
    assert "continuing from step 2" in capsys.readouterr().err
    assert cli.main([*arguments, f"{one}=1", f"{two}=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in ("different run", "second 0.25 -> 0.5", "corpus 0.75 -> 0.5")), line
    assert cli.main(["evaluate", "run", one, two, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name for name in found if "second" in name}, found


def test_evaluate(cwd, capsys):
    assert cli.main(["evaluate", "run", "--corpus", "corpus", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    trained = [json.loads(line) for line in (cwd / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert trained["split"] == "validation"
    scored = {"format": "segment_pair", "example_end": "sentence", "seq_len": 32, "rows": 12}
    assert {name: found.pop(name) for name in scored} == scored
    for name, value in found.items():
        assert value == pytest.approx(trained[name], rel=1e-6), name
    names = {"mlm_loss", "mlm_perplexity", "mlm_accuracy", "pair_accuracy", "unigram_loss", "unigram_accuracy"}
    assert names | {"pair_majority_accuracy"} <= found.keys() and found["pair_majority_accuracy"] >= 0.5
    assert cli.main(["evaluate", "run", "--corpus", "corpus"]) == 0
    assert re.search(r"^scored: format segment_pair, .*\n(.*\n)*  mlm_loss +\d\.\d{4}$", capsys.readouterr().out, re.M)


def test_fill_mask(cwd, capsys):
    assert cli.main(["fill-mask", "run", "the [MASK] sings over [MASK].", "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["[MASK] 1", "[MASK] 2"]
    assert all(line.count("%") == 3 for line in lines)
    assert cli.main(["fill-mask", "export", "the [MASK]", "--json"]) == 0
    (candidates,) = json.loads(capsys.readouterr().out)
    assert len(candidates) == 5 and candidates[0].keys() == {"token", "token_id", "probability"}
