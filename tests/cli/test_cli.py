"""The command line of `bert-jax`: every user error is one line with a remedy, exit code 2, and changes no file."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from bert_jax.cli import flags
from bert_jax.cli import main as cli
from bert_jax.config import flatten
from bert_jax.data.corpus import Corpus
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep.cli import main as data_cli
from tests.corpus_writer import CorpusWriter

ROOT = pathlib.Path(__file__).parents[2]
# The tiny config of the test session as a config file.
CONFIG_FILE = """
import json
from bert_jax.config import from_dict
def config():
    return from_dict(json.loads({text!r}))
"""

CONFIG_FILES = {
    "nothing.py": b"x = 1\n",
    "raises.py": b"def config():\n    wrong = 1 / 0\n",
    "misspelt.py": b"from bert_jax.config import Config\nconfig = lambda: Config(nam='x')\n",
    "refused.py": b"from bert_jax.config import Phase\ndef config():\n    return Phase(0)\n",
    "leaves.py": b"import sys\nsys.exit(0)\n",
    "broken.py": b"def config(:\n",
    "latin1.py": b"x = 'caf\xe9'\n",
    "zero.py": b"x\0\n",
    "three.py": b"config = lambda: 3\n",
    "settings.json": b"{}",
}


def snapshot(directory: pathlib.Path) -> dict[str, tuple]:
    """Every file with its time and content, every directory."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        about = path.stat()
        found[name] = (
            (about.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) if path.is_file() else ("directory",)
        )
    return found


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory, tiny_corpus, other_corpus, tiny_run, tiny_export, tiny_config):
    """A directory with a config file, two corpora, a finished run and its export; tests must not change it."""
    from bert_jax.config import to_dict

    directory = tmp_path_factory.mktemp("cli")
    (directory / "tiny.py").write_text(CONFIG_FILE.format(text=json.dumps(to_dict(tiny_config))))
    (directory / "notes").mkdir()
    (directory / "notes" / "mine.txt").write_text("not a run")
    for name, text in CONFIG_FILES.items():
        (directory / name).write_bytes(text)
    (directory / "folder.py").mkdir()
    for name, source in (("corpus", tiny_corpus), ("other", other_corpus), ("run", tiny_run), ("export", tiny_export)):
        shutil.copytree(source, directory / name)
    tokenizer = Tokenizer.load(tiny_corpus)
    with CorpusWriter(directory / "short", "short", tokenizer) as writer:
        for split in ("train", "train", "train", "validation"):
            writer.add(split, np.arange(5, 15), np.array([5, 5]), text_bytes=9)
        writer.finish({"sources": [{"spec": "test"}]})
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


PRETRAIN = ["pretrain", "tiny.py", "--corpus", "corpus", "--workdir", "new"]

EVALUATE = ["evaluate", "run", "--corpus", "corpus"]

BAD = {
    # name: (arguments, words of the error line)
    "no such command": (["pretrian"], ["'pretrian'", "did you mean 'pretrain'?"]),
    "no config": (["pretrain", "--corpus", "corpus"], ["needs a config first", "bert_tiny"]),
    "unknown preset": (["pretrain", "bert_tinny"], ["'bert_tinny'", "did you mean 'bert_tiny'?"]),
    "config file without config()": (["pretrain", "nothing.py", *PRETRAIN[2:]], ["no function config()"]),
    "config file that raises": (["schedule", "raises.py"], ["raises.py, line 2: ZeroDivisionError"]),
    "config file with a misspelt field": (["schedule", "misspelt.py"], ["misspelt.py, line 2: TypeError", "'nam'"]),
    "config file with a bad value": (["schedule", "refused.py"], ["refused.py, line 3: phases: steps is 0"]),
    "config file that leaves": (["schedule", "leaves.py"], ["leaves.py, line 2: SystemExit"]),
    "config file with bad syntax": (["schedule", "broken.py"], ["broken.py, line 1: SyntaxError: invalid syntax"]),
    "config file that is not UTF-8": (["schedule", "latin1.py"], ["latin1.py", "utf-8"]),
    "config file with a zero byte": (["schedule", "zero.py"], ["zero.py", "null bytes"]),
    "config file that returns another thing": (["schedule", "three.py"], ["three.py", "returned a int"]),
    "config that is a directory": (["schedule", "folder.py"], ["folder.py is a directory"]),
    "config that is no Python file": (["schedule", "settings.json"], ["settings.json does not end in .py"]),
    "config with a name that is too long": (["schedule", f"{'x' * 300}.py"], ["there is no config 'xxx"]),
    "config of the hub": (["schedule", "google-bert/bert-base-uncased"], ["did you mean 'bert_base'?"]),
    "config in other letters": (["schedule", "RoBERTa-base"], ["did you mean 'roberta_base'?"]),
    "nothing at all": ([], ["a command is missing", "pretrain", "bert-jax --help"]),
    "command in other letters": (["fill_mask"], ["there is no command 'fill_mask': did you mean 'fill-mask'?"]),
    "flag of transformers": (["pretrain", "bert_tiny", "--lr", "1"], ["no flag --lr: use --phases.0.learning-rate"]),
    "flag of transformers beside others": ([*PRETRAIN, "--output_dir", "x"], ["no flag --output-dir: use --workdir"]),
    "batch size": ([*PRETRAIN, "--batch-size", "8"], ["no flag --batch-size: use --phases.0.batch-size"]),
    "epochs": ([*PRETRAIN, "--epochs=8"], ["no flag --epochs: use --phases.0.steps"]),
    "row length": ([*PRETRAIN, "--max-seq-length", "8"], ["no flag --max-seq-length: use --phases.0.seq-len"]),
    "depth": ([*PRETRAIN, "--num-layers", "8"], ["no flag --num-layers: use --model.num-layers"]),
    "mixed precision": ([*PRETRAIN, "--fp16"], ["no flag --fp16: use --model.compute-dtype"]),
    "end of a flag": ([*PRETRAIN, "--weight-decay", "0"], ["no flag --weight-decay: use --optimizer.weight-decay"]),
    "section": ([*PRETRAIN, "--mesh", "2"], ["no flag --mesh: it is a section", "--mesh.data"]),
    "top-k": (["fill-mask", "run", "[MASK]", "--top-k", "3"], ["no flag --top-k: use --top"]),
    "two values": ([*PRETRAIN, "--seed", "1", "--seed=2"], ["--seed 1 and --seed 2 contradict each other"]),
    "yes and no": (["schedule", "bert_tiny", "--log.layers", "--log.no-layers"], ["contradict each other"]),
    "no value": (["pretrain", "bert_tiny", "--corpus", "--workdir", "new"], ["--corpus needs a value"]),
    "infinite rate": (
        ["schedule", "bert_tiny", "--phases.0.learning-rate", "inf"],
        ["learning_rate is inf: it must be a number in [0, 1e30]"],
    ),
    "integer beyond 64 bits": (
        ["schedule", "bert_tiny", "--phases.0.steps", str(2**70)],
        ["steps is 1180591620717411"],
    ),
    "price that is no number": (
        ["plan", "bert_tiny", "--topology", "v5e:2x2", "--price-per-chip-hour", "nan"],
        ["price_per_chip_hour is nan"],
    ),
    "no processes": (["doctor", "bert_tiny", "--corpus", "corpus", "--hosts", "0"], ["hosts is 0", "in [1, "]),
    "unknown override": ([*PRETRAIN, "--model.num-layer", "3"], ["--model.num-layer", "--model.num-layers"]),
    "unknown section": ([*PRETRAIN, "--modle.num-layers", "3"], ["--modle.num-layers"]),
    "ill-typed integer": ([*PRETRAIN, "--model.num-layers", "three"], ["--model.num-layers", "three"]),
    "ill-typed number": ([*PRETRAIN, "--phases.0.learning-rate", "fast"], ["learning-rate", "fast"]),
    "unknown choice": ([*PRETRAIN, "--optimizer.name", "sgd"], ["--optimizer.name", "sgd", "adamw"]),
    "unknown phase": ([*PRETRAIN, "--phases.1.steps", "3"], ["--phases.1.steps"]),
    "a value too many": ([*PRETRAIN, "extra"], ["extra"]),
    "out of range": ([*PRETRAIN, "--model.hidden-dropout", "1.5"], ["model.hidden_dropout is 1.5", "[0, 1)"]),
    "contradiction": ([*PRETRAIN, "--model.num-heads", "5"], ["model.hidden_size 64", "set model.head_size"]),
    "no corpus given": (["pretrain", "tiny.py", "--workdir", "new"], ["--corpus"]),
    "no corpus to evaluate on": (["evaluate", "run"], ["--corpus"]),
    "doctor without a config": (["doctor", "--corpus", "corpus"], ["doctor needs a config first"]),
    "doctor with an unknown field": (["doctor", "tiny.py", "--corpus", "corpus", "--sed", "3"], ["--sed", "--seed"]),
    "no workdir given": (["pretrain", "tiny.py", "--corpus", "corpus"], ["--workdir"]),
    "missing corpus": ([*PRETRAIN[:3], "nowhere", *PRETRAIN[4:]], ["nowhere", "no such corpus", "bert-data build"]),
    "directory that is no corpus": ([*PRETRAIN[:3], "notes", *PRETRAIN[4:]], ["notes", "not a finished corpus"]),
    "corpus without pairs to evaluate on": (
        [*PRETRAIN[:3], "short", *PRETRAIN[4:]],
        [
            "split 'validation' has 1 document(s)",
            "needs at least 2",
            "build it again with a larger --validation-fraction",
        ],
    ),
    "sequence beyond the position table": (
        [*PRETRAIN, "--phases.0.seq-len", "65"],
        ["phases.0.seq_len 65", "longer than the position table", "set model.max_positions to at least 65"],
    ),
    "token ids beyond the vocabulary": (
        [*PRETRAIN, "--model.vocab-size", "90"],
        ["token ids up to", "model.vocab_size is 90", "set --model.vocab-size"],
    ),
    "mesh that does not fit": ([*PRETRAIN, "--mesh.fsdp", "3"], ["does not fit", "mesh.fsdp"]),
    "batch that accumulation does not divide": (
        [*PRETRAIN, "--phases.0.accumulation", "3"],
        ["batch_size 8 is not divisible by accumulation 3"],
    ),
    "work directory of a different run": (
        ["pretrain", "tiny.py", "--corpus", "corpus", "--workdir", "run", "--seed", "5"],
        ["run holds a different run", "seed 0 -> 5", "choose another --workdir"],
    ),
    "work directory of a run on another corpus": (
        ["pretrain", "tiny.py", "--corpus", "other", "--workdir", "run"],
        ["holds a run on other corpora (", "/corpus instead of other)", "choose another --workdir"],
    ),
    "work directory with other files": (
        [*PRETRAIN[:-1], "notes"],
        ["notes holds files, but no run", "choose another --workdir"],
    ),
    "work directory that is a file": ([*PRETRAIN[:-1], "tiny.py"], ["tiny.py is a file", "another --workdir"]),
    "work directory below a file": ([*PRETRAIN[:-1], "tiny.py/run"], ["cannot write to", "choose another"]),
    "no window": ([*PRETRAIN, "--profile", "5"], ["--profile 5", "100:110"]),
    "empty window": ([*PRETRAIN, "--profile", "5:5"], ["--profile 5:5", "100:110"]),
    "evaluate with another tokenizer": (
        ["evaluate", "run", "--corpus", "other"],
        ["other was built with another tokenizer", "build it again with --tokenizer run/tokenizer.json"],
    ),
    "evaluate nothing": (["evaluate", "notes", "--corpus", "corpus"], ["notes holds no run"]),
    "evaluate on a missing corpus": (["evaluate", "run", "--corpus", "nowhere"], ["nowhere", "no such corpus"]),
    "evaluate longer rows": ([*EVALUATE, "--seq-len", "65"], ["--seq-len is 65", "from 8 to 64"]),
    "evaluate no rows": ([*EVALUATE, "--rows", "0"], ["--rows is 0", "at least 1"]),
    "evaluate an unknown format": ([*EVALUATE, "--format", "pairs"], ["--format", "pairs", "segment_pair"]),
    "fill-mask without a mask": (["fill-mask", "run", "the river"], ["no [MASK]"]),
    "fill-mask of a long text": (["fill-mask", "export", "[MASK] " + "stone " * 99], ["position table 64", "shorten"]),
    "fill-mask without a model": (["fill-mask", "nowhere", "a [MASK]"], ["nowhere does not exist"]),
    "fill-mask without a text": (["fill-mask", "run"], ["fill-mask needs TEXT"]),
    "fill-mask with a top that is no number": (
        ["fill-mask", "run", "a [MASK]", "--top", "nan"],
        ["error: --top takes INT, not 'nan'"],
    ),
    "empty corpus": ([*PRETRAIN[:3], "", *PRETRAIN[4:]], ["error: --corpus is empty"]),
    "empty workdir": ([*PRETRAIN[:5], ""], ["error: --workdir is empty"]),
    "empty workdir after a sign": ([*PRETRAIN[:4], "--workdir="], ["error: --workdir is empty"]),
    "empty config": (["schedule", ""], ["argument 1 is empty"]),
    "empty source to start from": ([*PRETRAIN, "--init-from", ""], ["--init-from is empty"]),
    "empty plot": (["schedule", "bert_tiny", "--plot", ""], ["--plot is empty"]),
    "evaluate an empty run": (["evaluate", "", "--corpus", "corpus"], ["error: argument 1 is empty"]),
    "evaluate on an empty corpus": (["evaluate", "run", "--corpus", ""], ["error: --corpus is empty"]),
    "fill-mask with an empty model": (["fill-mask", "", "a [MASK]"], ["error: argument 1 is empty"]),
    "convert to an empty destination": (["convert", "run", ""], ["error: argument 2 is empty"]),
    "convert nothing": (["convert", "notes", "new"], ["notes is not a run or a model"]),
    "convert onto something": (["convert", "run", "notes"], ["notes exists already"]),
    "convert to an unknown form": (["convert", "run", "new", "--to", "onnx"], ["onnx", "huggingface"]),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_one_line(cwd, capfd, name):
    arguments, words = BAD[name]
    assert cli.main(arguments) == 2
    captured = capfd.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and captured.out == "" and len(line) < 400
    for word in words:
        assert word in line, line
    assert not re.search(r"[│╭╰─\x1b]|  ", line)


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "damaged", "--corpus", "corpus"],
        ["fill-mask", "damaged", "a [MASK]"],
        ["convert", "damaged", "new"],
        ["pretrain", "tiny.py", "--corpus", "corpus", "--workdir", "damaged"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_damaged_checkpoints(cwd, capfd, arguments):
    """One warning for each damaged checkpoint, then the error; training does not restart on top of them."""
    assert cli.main(arguments) == 2
    *before, line = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and "every checkpoint is damaged" in line and "restore a copy" in line
    warnings = [text for text in before if text.startswith("warning: checkpoint ")]
    assert len(warnings) == 2 and (warnings == before or arguments[0] == "pretrain")


def test_batch_that_the_mesh_cannot_split(cwd):
    """In a new process with two devices: their number is fixed when jax starts."""
    arguments = [*PRETRAIN, "--phases.0.batch-size", "9"]
    environment = dict(os.environ, JAX_NUM_CPU_DEVICES="2", JAX_PLATFORMS="cpu")
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "bert_jax", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: phases.0.batch_size 9 is not divisible by 2 row shards")
    assert line.endswith("use a multiple of 2")


def test_overview(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert re.search(rf"^  {command} +[A-Z].{{20}}", shown, re.M)


@pytest.mark.parametrize("main", [cli.main, data_cli.main])
def test_version(main, capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"bert-(jax|data) \S+ \(jax \S+, jaxlib \S+, Python \S+\)\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help(command, capsys):
    assert cli.main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert command in shown and shown.count("\n  --") < 35
    if command == "pretrain":
        assert 20 <= shown.count("\n  --") <= 25
        assert "--model.num-layers" in shown and "Depth (L)" in shown and "--phases.0.learning-rate" in shown
        assert re.search(r"\d+ more flags: bert-jax pretrain CONFIG --help-all$", shown)


def test_help_has_the_preset_s_values(capsys):
    assert cli.main(["pretrain", "bert_tiny", "-h"]) == 0
    assert "(default: 128)" in capsys.readouterr().out  # not the class's


def test_help_documents_every_field(capsys):
    """Each flag of pretrain is in the long help."""
    assert cli.main(["pretrain", "bert_base", "--help-all"]) == 0
    shown = capsys.readouterr().out
    from bert_jax.config import presets, to_dict

    for path in flatten(to_dict(presets.load_config("bert_base"))):
        assert f"\n  --{path}".replace("_", "-") in shown
    assert all(f"\n  --{name} " in shown for name in flags.COMMON_FIELDS.split())


def test_every_synonym_leads_to_a_flag(capsys):
    """The suggestion for `--lr` and the like is a flag of some command; the synonym itself is not a flag."""
    shown = ""
    for command in cli.COMMANDS:
        assert cli.main([command, "--help-all"]) == 0
        page = capsys.readouterr().out
        shown += page if command != "evaluate" else ""  # its --seq-len is a synonym in the other commands
    for flag, others in flags.FLAG_SYNONYMS.items():
        assert re.search(rf"^  {flag}\b", shown, re.M), flag
        assert not [one for one in others.split() if re.search(rf"^  --{one}[ \n]", shown, re.M)], flag


@pytest.mark.parametrize("main", [cli.main, data_cli.main])
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_output_that_cannot_be_written(main, flag, monkeypatch, capsys):
    """A closed pipe (`| head`) exits without a message, as in other programs; a full disk is a one-line error."""
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for file, code, line in (
        (writer, 141, ""),
        (full, 2, "error: standard output: No space left on device\n"),
    ):
        with os.fdopen(file, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            assert main([flag]) == code
        assert capsys.readouterr().err == line


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "schedule", (None, interrupt))
    assert cli.main(["schedule", "bert_tiny"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_output_of_a_config_file_goes_to_stderr(tmp_path, capsys):
    (tmp_path / "loud.py").write_text("print('hello')\nfrom configs.bert_tiny import config\n")
    assert cli.main(["schedule", str(tmp_path / "loud.py"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["name"] == "bert_tiny" and captured.err == "hello\n"


def test_pretrain_a_file_with_overrides(sandbox, tmp_path, capsys, monkeypatch):
    """Flags override fields of the file; a repeated command finds the run finished."""
    monkeypatch.chdir(tmp_path)  # a relative --workdir
    arguments = ["pretrain", str(sandbox / "tiny.py"), "--corpus", str(sandbox / "corpus"), "--workdir", "run"]
    arguments += ["--phases.0.steps", "2", "--evaluation.every", "0"]
    arguments += ["--phases.0.learning-rate", "3e-3", "--objective.pair", "none", "--log.no-tensorboard"]
    arguments += ["--optimizer.clip-norm", "None", "--data.mask-copies", "3", "--evaluation.rows", "4"]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert "finished: 2 steps" in captured.out
    warnings = [line for line in captured.err.splitlines() if line.startswith("warning: ")]
    for words in ("set --data.example-copies 3 too", "the peak 0.003 is never reached", "fewer than checkpoint.every"):
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


def test_pretrain_and_evaluate_a_mixture(sandbox, second_corpus, tmp_path, capsys, monkeypatch):
    """Shares are stored; the order of flags has no effect; other shares and other corpora are refused."""
    monkeypatch.chdir(tmp_path)
    one, two = f"--corpus={sandbox / 'corpus'}", f"--corpus={second_corpus}"
    arguments = [
        "pretrain",
        str(sandbox / "tiny.py"),
        "--workdir",
        "run",
        "--phases.0.steps",
        "2",
        "--evaluation.rows",
        "4",
    ]
    assert cli.main([*arguments, f"{one}=3", f"{two}=1"]) == 0
    shares = json.loads((tmp_path / "run" / "config.json").read_text())["corpora"]
    assert sorted(shares.values()) == [0.25, 0.75]
    assert shares[Corpus.open(second_corpus, "train").identity] == 0.25
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert cli.main([*arguments, f"{two}=0.5", f"{one}=1.5"]) == 0
    assert "continuing from step 2" in capsys.readouterr().err
    for mixture, words in (
        ([f"{one}=1", f"{two}=1"], ["other shares", "second 0.25 -> 0.5", "corpus 0.75 -> 0.5"]),
        ([one], ["on other corpora (", "second too)"]),
        ([one, two, f"--corpus={sandbox / 'other'}"], ["both named 'corpus'"]),
    ):
        assert cli.main([*arguments, *mixture]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert all(word in line for word in words), line
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
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


@pytest.mark.parametrize("model", ["run", "export"])
def test_fill_mask(cwd, capsys, model):
    assert cli.main(["fill-mask", model, "the [MASK] sings over [MASK].", "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["[MASK] 1", "[MASK] 2"]
    assert all(line.count("%") == 3 for line in lines)
    assert cli.main(["fill-mask", model, "the [MASK]", "--json"]) == 0
    (candidates,) = json.loads(capsys.readouterr().out)
    assert len(candidates) == 5 and candidates[0].keys() == {"token", "token_id", "probability"}


def test_convert(cwd, tmp_path, capsys):
    for source in ("run", "export"):
        assert cli.main(["convert", source, str(tmp_path / source)]) == 0
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (cwd / "export/model.safetensors").read_bytes()
    assert (tmp_path / "export" / "model.safetensors").read_bytes() == (cwd / "export/model.safetensors").read_bytes()
