"""Flags of `bert-jax` and `bert-data`: help, and mistakes that are found before a command imports jax."""

import functools
import json
import os
import re
import shlex
import sys

import pytest

from bert_jax.analysis import analyse
from bert_jax.analysis.heads.heads import HeadsSettings
from bert_jax.cli import main as cli
from bert_jax.command.flags import COMMON_FIELDS, SYNONYMS, list_flags, parse
from bert_jax.compress.prune_options import PruneOptions
from bert_jax.config import Config, flatten, presets, to_dict
from bert_jax.finetune.options import FileOptions, FinetuneOptions
from bert_jax.finetune.tasks import TASKS
from data_prep.cli import main as data_cli

PROGRAMS = {"bert-jax": cli.main, "bert-data": data_cli.main}
PRETRAIN = "bert-jax pretrain bert_tiny --corpus corpus --workdir new"
SCHEDULE = "bert-jax schedule bert_tiny"
ABLATE = "bert-jax ablate nsp_tiny --corpus corpus --workdir new"
ADAPT = "bert-jax adapt run --corpus c --workdir w"
EVALUATE = "bert-jax evaluate run --corpus c"
BUILD = "bert-data build --source text:a --tokenizer t --out c"
TOKENIZER = "bert-data tokenizer --out new.json"
MISTAKES = [
    # command line, parts of the error's line
    ("bert-jax", "a command is missing ... pretrain ... bert-jax --help"),
    ("bert-jax pretrian", "no command 'pretrian': did you mean 'pretrain'?"),
    ("bert-jax fill_mask", "no command 'fill_mask': did you mean 'fill-mask'?"),
    ("bert-data", "a command is missing ... tokenizer, build, inspect, verify"),
    ("bert-jax pretrain --corpus corpus", "needs a config first ... bert_tiny"),
    ("bert-jax pretrain bert_tinny", "'bert_tinny' ... did you mean 'bert_tiny'?"),
    ("bert-jax schedule google-bert/bert-base-uncased", "did you mean 'bert_base'?"),
    ("bert-jax schedule RoBERTa-base", "did you mean 'roberta_base'?"),
    (f"bert-jax schedule {'x' * 300}.py", "there is no config 'xxx"),
    ("bert-jax schedule raises.py", "raises.py, line 2: ZeroDivisionError"),
    ("bert-jax schedule misspelt.py", "misspelt.py, line 2: TypeError ... 'nam'"),
    ("bert-jax schedule refused.py", "refused.py, line 3: phases: steps is 0"),
    ("bert-jax schedule leaves.py", "leaves.py, line 2: SystemExit"),
    ("bert-jax schedule cancels.py", "cancels.py, line 2: CancelledError"),
    ("bert-jax schedule broken.py", "broken.py, line 1: SyntaxError: invalid syntax"),
    ("bert-jax schedule zero.py", "zero.py ... null bytes"),
    ("bert-jax schedule folder.py", "folder.py is a directory"),
    ("bert-jax schedule settings.json", "settings.json does not end in .py"),
    # Unknown flags: of other libraries, without a section, misspelt.
    ("bert-jax pretrain bert_tiny --lr 1", "no flag --lr: use --phases.0.learning-rate"),
    (f"{PRETRAIN} --output_dir x", "no flag --output-dir: use --workdir"),
    (f"{PRETRAIN} --num-layers 8", "no flag --num-layers: use --model.num-layers"),
    (f"{PRETRAIN} --weight-decay 0", "no flag --weight-decay: use --optimizer.weight-decay"),
    (f"{PRETRAIN} --mesh 2", "no flag --mesh: it is a section ... --mesh.data"),
    (f"{PRETRAIN} --model.num-layer 3", "--model.num-layer: did you mean '--model.num-layers'?"),
    (f"{PRETRAIN} --xyzzy 3", "no flag --xyzzy: `bert-jax pretrain bert_tiny --help-all` shows all flags"),
    ("bert-jax fill-mask run [MASK] --top-k 3", "no flag --top-k: use --top"),
    ("bert-data verify c -- --fast", "no flag --fast"),
    (f"{PRETRAIN} extra", "'extra' is neither a flag nor the value of one"),
    # Missing and contradictory arguments.
    ("bert-jax pretrain bert_tiny", "needs --corpus DIR[=WEIGHT] and --workdir DIR: `bert-jax pretrain bert_tiny --h"),
    ("bert-jax evaluate run", "needs --corpus DIR: "),
    (ADAPT, "needs --general DIR[=WEIGHT]: "),
    (f"{ADAPT} --general g --replay 1", "--replay is 1: it must be a number in [0, 1)"),
    (f"{ADAPT} --general g --epochs 0", "--epochs is 0: it must be a number in (0, "),
    ("bert-jax fill-mask run", "fill-mask needs TEXT: "),
    ("bert-data build", "needs --source SPEC and --tokenizer FILE and --out DIR: "),
    (TOKENIZER, "needs --source or --from: "),
    (f"{TOKENIZER} --source text:a --from b", "--source and --from contradict each other"),
    (f"{TOKENIZER} --source text:a --lowercase --no-lowercase", "--lowercase and --no-lowercase contradict each other"),
    (f"{PRETRAIN} --seed 1 --seed=2", "--seed 1 and --seed 2 contradict each other"),
    (f"{PRETRAIN} --init-from a --start.source b", "--init-from a and --start.source b contradict each other"),
    ("bert-jax pretrain bert_tiny --corpus --workdir new", "--corpus needs a value"),
    # Empty values, such as unset variables of a shell.
    ("bert-jax pretrain bert_tiny --corpus '' --workdir new", "error: --corpus is empty"),
    ("bert-jax pretrain bert_tiny --corpus corpus --workdir=", "error: --workdir is empty"),
    ("bert-jax schedule ''", "argument 1 is empty"),
    # Values.
    (f"{PRETRAIN} --model.num-layers three", "--model.num-layers is 'three': it must be a whole number in [1, 1e4]"),
    (f"{PRETRAIN} --phases.0.learning-rate fast", "learning-rate is 'fast': it must be a number in [0, 1e30]"),
    (f"{PRETRAIN} --optimizer.name sgd", "--optimizer.name is 'sgd': it must be one of adamw, lamb"),
    (f"{PRETRAIN} --model.num-heads 5", "model.hidden_size 128 ... set model.head_size"),
    (f"{PRETRAIN} --micro-batch many", "--micro-batch is 'many': it must be a whole number ... auto"),
    (f"{PRETRAIN} --profile 5", "--profile 5 ... 100:110"),
    (f"{PRETRAIN} --profile 5:5", "--profile 5:5 ... 100:110"),
    (f"{SCHEDULE} --phases.0.learning-rate inf", "learning_rate is inf: it must be a number in [0, 1e30]"),
    (f"{SCHEDULE} --phases.0.seq-len 513", "phases.0.seq_len 513 ... set model.max_positions to at least 513"),
    (f"{SCHEDULE} --data.format nsp", "--data.format ... segment_pair"),
    ("bert-jax doctor bert_tiny --corpus corpus --hosts 0", "hosts is 0 ... in [1, "),
    ("bert-jax fill-mask run [MASK] --top nan", "error: --top is 'nan': it must be a whole number"),
    (f"{EVALUATE} --format pairs", "--format is 'pairs' ... segment_pair"),
    (f"{EVALUATE} --cluster.process 1", "--cluster.process need --cluster.coordinator HOST:PORT"),
    (f"{EVALUATE} --cluster.coordinator h:1 --cluster.processes 2 --cluster.process 2", "it must be from 0 to 1"),
    (f"{ABLATE} --part 9/8", "--part 9/8: write the part and the number of parts, as in 2/8"),
    (f"{ABLATE} --part 0/8", "--part 0/8: write the part"),
    (f"{ABLATE} --part 2", "--part 2: write the part"),
    (f"{ABLATE} --retries -1", "--retries is "),
    ("bert-jax ablate --corpus c --workdir new", "ablate needs STUDY"),
    ("bert-jax ablate nsp_tinny --corpus c --workdir new", "no study 'nsp_tinny': did you mean 'nsp_tiny'? Studies"),
    ("bert-jax ablate raises.py --corpus c --workdir new", "raises.py: there is no function study()"),
    ("bert-jax ablate folder.py --corpus c --workdir new", "there is no study 'folder.py'"),
    (f"{ABLATE} --workdir other", "contradict each other"),
    ("bert-jax convert run new --to gguf", "--to is 'gguf' ... huggingface"),
    ("bert-jax pretrain bert_tiny --workdir new --corpus corpus=nan", "'nan' is not a weight: write a"),
    (f"{BUILD} --workers 0", "--workers is 0: it must be a whole number in [1, 1000]"),
    (f"{BUILD} --workers ²", "--workers is '²'"),
    (f"{BUILD} --memory-mb 0", "--memory-mb is 0: it must be a whole number in [16, 16777216]"),
    (f"{BUILD} --memory-mb 60 --workers 4", "--memory-mb 60 is less than 16 for each of 4 workers: give at least 64"),
    (f"{BUILD} --memory-mb 16000000", "--memory-mb 16000000 is more than the "),
    (f"{BUILD} --memory-mb 512 --engine beam", "--memory-mb is for processes of this machine"),
    (f"{BUILD} --validation-fraction 1", "validation-fraction is 1: it must be a number in (0, 1)"),
    (f"{BUILD} --permutations {'9' * 5000}", "--permutations is '999"),
    (f"{BUILD} --drop-near-duplicates 2", "drop-near-duplicates is 2: it must be a number in (0, 1)"),
    (f"{BUILD} --drop-near-duplicates 0.5 0.6", "--drop-near-duplicates is '0.5 0.6': it must be"),
    (f"{BUILD} --language english", "--language english: it is not an ISO 639 code"),
    (f"{BUILD} --shingle-words 3", "add --drop-near-duplicates"),
    (f"{BUILD} --decontamination-words 3", "add --decontaminate"),
    (f"{TOKENIZER} --source text:a --sampling-exponent 0.3", "--sampling-exponent weights sources: give each language"),
    (f"{TOKENIZER} --source text:a --sampling-exponent 1.5", "sampling-exponent is 1.5: it must be a number in [0, 1]"),
    (f"{TOKENIZER} --source text:a --kind morphemes", "--kind is 'morphemes': it must be one of wordpiece, bpe"),
]
CONFIG_FILES = {
    "raises.py": b"def config():\n    wrong = 1 / 0\n",
    "misspelt.py": b"from bert_jax.config import Config\nconfig = lambda: Config(nam='x')\n",
    "refused.py": b"from bert_jax.config import Phase\ndef config():\n    return Phase(0)\n",
    "leaves.py": b"import sys\nsys.exit(0)\n",
    "cancels.py": b"import asyncio\nraise asyncio.CancelledError\n",
    "broken.py": b"def config(:\n",
    "zero.py": b"x\0\n",
    "settings.json": b"{}",
}
ARGUMENTS = {
    "pretrain": ["bert_base", "--corpus", "corpus", "--workdir", "new"],
    "adapt": ["run", "--corpus", "corpus", "--general", "general", "--workdir", "new"],
    "doctor": ["bert_base", "--corpus", "corpus"],
    "ablate": ["nsp_tiny", "--corpus", "corpus", "--workdir", "new"],
    "plan": ["bert_base", "--topology", "v5e:2x2"],
    "schedule": ["bert_base"],
    "evaluate": ["run", "--corpus", "corpus"],
    "fill-mask": ["run", "a [MASK]"],
    "finetune": ["run", "--task", "sst2", "--data", "data", "--workdir", "new"],
    "compress distil": ["run", "--task", "sst2", "--data", "data", "--workdir", "new"],
    "compress pretrain": ["bert_base", "--teacher", "run", "--corpus", "corpus", "--workdir", "new"],
    "compress prune": ["run", "--data", "data", "--out", "new"],
    "compress trim-vocabulary": ["run", "--text", "a.txt", "--out", "new"],
    "compress quantise": ["run", "--out", "new"],
    "report": ["run"],
    "convert": ["run", "new"],
    "merge": ["run", "run", "--out", "new"],
}
"""What every command needs."""
READ_TASK_FILES = {
    "finetune": [""],
    "compress distil": [""],
    "compress prune": [""],
    "compress quantise": [""],
    "analyse": ["heads.", "fine-tuning."],
}
"""Commands that read the files of tasks, and the sections of their flags."""


@functools.cache
def flags_of(command):
    args = cli.parse(command, ARGUMENTS[command])
    return list(list_flags(type(args), args))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("flags")
    (directory / "folder.py").mkdir()
    for name, content in CONFIG_FILES.items():
        (directory / name).write_bytes(content)
    return directory


@pytest.mark.parametrize(("line", "parts"), MISTAKES, ids=[line[:80] for line, _ in MISTAKES])
def test_mistakes_are_one_line(folder, monkeypatch, capsys, line, parts):
    monkeypatch.chdir(folder)
    program, *words = shlex.split(line)
    assert PROGRAMS[program](words) == 2
    captured = capsys.readouterr()
    (message,) = captured.err.splitlines()
    assert message.startswith("error: ") and captured.out == "" and len(message) < 500 + 2000 * ("999" in line)
    assert all(part in message for part in parts.split(" ... ")), message
    assert {path.name for path in folder.iterdir()} == {*CONFIG_FILES, "folder.py"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_overview_and_version(program, capsys):
    commands = {"bert-jax": cli.COMMANDS, "bert-data": data_cli.COMMANDS}[program]
    assert PROGRAMS[program](["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {command} +[A-Z].{{20}}", shown, re.M) for command in commands)
    assert PROGRAMS[program](["--version"]) == 0
    assert re.fullmatch(rf"{program} \S+ \(jax \S+, jaxlib \S+, Python \S+\)\n", capsys.readouterr().out)


def test_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for program, commands in (("bert-jax", cli.PARSED), ("bert-data", data_cli.COMMANDS)):
        for command in commands:
            assert PROGRAMS[program]([*command.split(), "--help"]) == 0
            shown = capsys.readouterr().out
            assert shown.startswith(f"usage: {program} {command} ") and shown.count("\n  --") <= 36
            assert command == "launch" or max(map(len, shown.splitlines())) <= 80
    assert cli.main(["pretrain", "bert_tiny", "-h"]) == 0
    shown = capsys.readouterr().out
    names = re.findall(r"^  --([\w.-]+)", shown, re.M)
    assert {*COMMON_FIELDS.split(), "corpus", "workdir"} <= {*names} and len(names) < 30
    assert re.search(
        r"--model.num-layers INT\n +Depth \(L\)[.] \(default: 2\)\n", shown
    )  # the preset's, not the class's
    assert re.search(r"\n\d+ more flags: bert-jax pretrain bert_tiny --help-all$", shown.rstrip())


def test_help_documents_every_field(capsys):
    assert cli.main(["pretrain", "bert_base", "--help-all"]) == 0
    shown = capsys.readouterr().out
    values = to_dict(presets.load_config("bert_base"))
    assert values.pop("finetune") is values.pop("distil") is None  # sections of other commands
    for path in flatten(values):
        assert f"\n  --{path}".replace("_", "-") in shown


@pytest.mark.parametrize("command", [one for one in ARGUMENTS if one not in ("adapt", "doctor", "schedule")])
def test_the_listed_flags_are_those_that_are_parsed(command):
    """Every flag with its value gives the same arguments again. Commands that are left out have pretrain's flags."""
    args, words = cli.parse(command, ARGUMENTS[command]), ARGUMENTS[command][:1]
    for flag in list_flags(type(args), args):
        if isinstance(flag.default, bool) and len(flag.names) == 2 and not flag.metavar:
            words.append(flag.names[not flag.default])
        elif flag.is_repeatable:
            words += [word for one in flag.default for word in (flag.names[0], one)]
        elif flag.default != () and flag.names[0].startswith("--"):
            values = flag.default if isinstance(flag.default, tuple) else (flag.default,)
            words += [flag.names[-1], *map(str, values)]
    if command in ("fill-mask", "convert", "merge"):
        words.insert(1, ARGUMENTS[command][1])
    again = cli.parse(command, words)
    assert all(vars(again)[name] == value for name, value in vars(args).items() if name != "words")


def test_commands_that_read_task_files_have_their_flags():
    """Under one name in all commands, and passed on; messages about the files advise these flags."""
    commands = {command: flags_of(command) for command in ARGUMENTS if command.split()[0] in ("finetune", "compress")}
    commands |= {"analyse": list(list_flags(analyse.command_type()))}
    values = {"text_columns": ("a", "b"), "label_column": "c", "tag_column": 1, "word_column": 2, "skip_damaged": True}
    values["label_separator"] = ";"
    given = {name: values[name] for name in FileOptions().file_options()}
    assert set(given) == {name for spec in TASKS.values() for name in spec.file_options}
    for command, sections in READ_TASK_FILES.items():
        names = {name for flag in commands[command] for name in flag.names}
        assert names >= {f"--{prefix}{one.replace('_', '-')}" for prefix in sections for one in given}, command
    assert PruneOptions(**given).finetune_options() == FinetuneOptions(**given)
    assert HeadsSettings(**given).finetune_options(64) == FinetuneOptions(**given, max_length=64)


def test_every_synonym_leads_to_a_flag():
    """The suggestion for `--lr` and the like is a flag of some command; the synonym is no flag of a command with it."""
    names = {command: {name for flag in flags_of(command) for name in flag.names} for command in ARGUMENTS}
    del names["compress pretrain"]  # it has flags of its own for the sizes of a model
    del names["adapt"]  # and this one has --epochs
    names = names.values()
    for flag, others in SYNONYMS.items():
        commands = [flags for flags in names if flag in flags]
        assert commands and not any(flags & {f"--{other}" for other in others.split()} for flags in commands)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_output_that_cannot_be_written(program, flag, monkeypatch, capsys):
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
            assert PROGRAMS[program]([flag]) == code
        assert capsys.readouterr().err == line


def test_messages_that_nobody_reads(tmp_path, monkeypatch, capsys):
    """If the reader of stderr is gone (`2>&1 | tee log` whose tee died), the command goes on with its exit code."""
    (tmp_path / "loud.py").write_text("print('hello')\nfrom configs.bert_tiny import config\n")
    for words, code in ((["schedule", str(tmp_path / "loud.py"), "--json"], 0), (["schedule", "no_preset"], 2)):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w", buffering=1) as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            assert cli.main(words) == code
        printed = capsys.readouterr().out
        assert code or json.loads(printed)["name"] == "bert_tiny"


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.PARSED, "schedule", interrupt)
    assert cli.main(["schedule", "bert_tiny"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_output_of_a_config_file_goes_to_stderr(tmp_path, capsys):
    (tmp_path / "loud.py").write_text("print('hello')\nfrom configs.bert_tiny import config\n")
    assert cli.main(["schedule", str(tmp_path / "loud.py"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["name"] == "bert_tiny" and captured.err == "hello\n"


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--optimizer.bias-correction false", "optimizer.bias_correction", False),
        ("--optimizer.bias_correction=TRUE", "optimizer.bias_correction", True),
        ("--optimizer.bias-correction none", "optimizer.bias_correction", None),
        ("--log.layers false", "log.layers", False),
        ("--log.layers=true", "log.layers", True),
        ("--log.layers False --log.no-tensorboard", "log.tensorboard", False),
        ("--log.no-layers", "log.layers", False),
        ("--recovery.spike none", "recovery.spike", None),
    ],
)
def test_true_false_and_none_in_any_case(words, field, value):
    """`--optimizer.bias-correction false` was refused, as in transformers' flags it is not."""
    config = parse(Config, words.split(), "x", Config(name="x"))
    section, name = field.split(".")
    assert getattr(getattr(config, section), name) is value
