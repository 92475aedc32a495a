"""Reports on runs: the command `bert-jax report`, its sections, and mistakes."""

import dataclasses
import json
import pathlib
import re
import shlex
import shutil
import sys
import types

import pytest

from bert_jax import config as config_lib
from bert_jax import provenance
from bert_jax.cli import main as cli
from bert_jax.config import FinetuneConfig, Phase, TaskHead, presets
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.report import Note, Section, Table, html, text
from bert_jax.run_report import cost, metric_blocks, run_files, sections, settings
from bert_jax.run_report.group_tokens import group_blocks
from bert_jax.run_report.run_files import read_runs
from bert_jax.training.run_directory import goodput

HOSTILE = "<script>&'\"$x$"


def report(*words) -> int:
    return cli.main(["report", *map(str, words)])


def edit(path, change) -> None:
    """Replace the JSON values of a file: one, or those of the lines of a .jsonl file."""
    if path.suffix == ".jsonl":
        values = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(value) + "\n" for value in values if value is not None))
    else:
        path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.fixture
def run(tiny_run):
    (run,) = read_runs([tiny_run])
    return run


@pytest.fixture
def two(tmp_path, tiny_run):
    """Two directories: the run of the session, and a copy with other results and no pair objective."""
    for name in ("first", "second"):
        shutil.copytree(tiny_run, tmp_path / name)

    def worse(line):
        without = {name: value for name, value in line.items() if not name.startswith("pair")}
        return without | {"mlm_loss": line["mlm_loss"] + 0.5}

    edit(tmp_path / "second/metrics.jsonl", worse)
    edit(tmp_path / "second/config.json", lambda file: file | {"config": file["config"] | {"seed": 7}})
    return tmp_path / "first", tmp_path / "second"


def change(run, **config):
    """The run with another config."""
    return dataclasses.replace(run, file=run.file | {"config": config_lib.replace(run.config, **config)})


def table_of(all_sections, title) -> dict[str, tuple[str, ...]]:
    """The rows of the tables of a section, by their first cell."""
    (section,) = (one for one in all_sections if one.title == title)
    return {row[0]: row[1:] for block in section.blocks if isinstance(block, Table) for row in block.rows}


@pytest.mark.slow
def test_page_of_a_run(tiny_run, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert report(tiny_run, "--out", page) == 0
    content = page.read_bytes()
    assert report(tiny_run, "--out", page) == 0, "a page of this command is replaced"
    assert page.read_bytes() == content
    shown = content.decode()
    assert "finished after step 8: all steps are done" in shown and "http" not in shown
    titles = re.findall("<h[12]>(.*?)</h", shown)
    assert titles == [
        *("Run workdir", "Final metrics", "Held-out metrics", "Training", "Throughput", "Goodput", "Filled masks"),
        *("Command", "Settings", "Provenance"),
    ]
    assert shown.count("<svg") > 8 and "mlm_loss, held out" in shown and "unigram" in shown
    capsys.readouterr()
    assert report(tiny_run, "--no-samples") == 0
    printed = capsys.readouterr().out
    assert "mlm_loss, held out:" in printed and "Filled masks" not in printed


def test_values_of_a_run(run):
    """Against the files."""
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    held_out = [line for line in lines if line["split"] == "validation"]
    (loss,) = (one for one in metric_blocks.held_out_curves([run]) if one.title == "mlm_loss, held out")
    assert [one.name for one in loss.series] == ["mlm_loss", "unigram"] and loss.series[1].dashed
    assert loss.series[0].x == tuple(line["step"] for line in held_out)
    assert loss.series[0].y == tuple(line["mlm_loss"] for line in held_out)
    assert loss.series[1].y == tuple(line["unigram_loss"] for line in held_out)
    training = metric_blocks.training_curves([run])
    assert all(len(one.series) == 1 for one in training), "baselines of single batches are not drawn"
    titles = [one.title for one in training]
    assert {"learning_rate, training", "gradient_norm, training", "tokens per second, training"} < set(titles)
    assert not any("/" in title or "unigram" in title for title in titles)
    shown = table_of(sections.run_sections([run], ()), "Final metrics")
    assert shown["mlm_loss"][0] == f"{held_out[-1]['mlm_loss']:.5g}"
    assert shown["mlm_loss"][2] == f"{held_out[-1]['unigram_loss']:.5g} (unigram)"
    assert shown["learning_rate"][0] == settings.MISSING


def test_tokens_by_source_and_language(run):
    """Half of the epochs have German: two thirds of the tokens that are read are English, of as many of both."""
    (identity,) = run.file["corpora"]
    (description,) = run.file["corpus_descriptions"].values()
    assert group_blocks(run) == ()
    groups = [{"source": "web", "language": code, "score": None, "tokens": 5000} for code in ("en", "de")]
    run = change(run, data={"language_weights": (("de", 0.5),)})
    run.file["corpus_descriptions"] = {identity: description | {"groups": groups}}
    seen = run.last(metric_blocks.TRAINING)["tokens_seen"]
    shown = {row[1]: row for row in group_blocks(run)[1].rows}
    assert shown["en"] == ("web", "en", "5,000", f"{seen * 2 / 3:,.0f}", "66.67%", f"{seen * 2 / 3 / 5000:.2f}")
    assert shown["de"][-2:] == ("33.33%", f"{seen / 3 / 5000:.2f}")
    twice = run.config.phases * 2
    weights = [dataclasses.replace(twice[0], corpus_weights=(("other", 1.0), (description["name"], 0.0))), twice[1]]
    assert [row[3] for row in group_blocks(change(run, phases=tuple(weights)))[1].rows] == ["0", "0"]


def test_environment_is_recorded_once_per_attempt(tiny_run, tmp_path, run):
    (environment,) = goodput.environments(tiny_run)
    assert environment["devices"].endswith("x cpu") and {"python", "jax", "processes"} < environment.keys()
    assert environment["code"] == provenance.describe_code(provenance.code()) and environment["date"][:2] == "20"
    shown = table_of(sections.run_sections([run], ()), "Provenance")
    assert shown["jax"] == (environment["jax"],) and shown["attempts"] == ("1",)
    assert shown["SHA-256 of the data"] == (", ".join(run.file["corpora"]),)


def test_cost_so_far_and_to_the_end(run, tiny_run, capsys):
    """8 steps of 8 rows in an hour and a half of 4 chips, half an hour of which was between attempts."""
    recorded = run.goodput | {"wall": 5400.0, "down": 1800.0}
    run = dataclasses.replace(run, goodput=recorded, environments=[{"devices": "4 x TPU v5 lite"}])
    phases = (*run.config.phases, dataclasses.replace(run.config.phases[0], steps=4, seq_len=64))
    longer = dataclasses.replace(change(run, phases=phases), checkpoint=None)
    rows = [row[1:] for block in cost.cost_blocks([longer], 2.5) if isinstance(block, Table) for row in block.rows]
    assert rows == [("so far", "1", "4", "10.00"), ("to the end, estimated", "1", "4", "10.00")]
    (row,) = (row for block in cost.cost_blocks([run], 2.5) if isinstance(block, Table) for row in block.rows)
    assert row[1] == "so far", "it has ended"
    for kind, chips in (("TPU v3", 4), ("cpu", 8)):
        assert cost._chips(dataclasses.replace(run, environments=[{"devices": f"8 x {kind}"}])) == chips
    assert cost.cost_blocks([dataclasses.replace(run, environments=[])], 2.5) == []
    assert report(tiny_run, "--no-samples", "--price-per-chip-hour", "2.5") == 0
    assert "At 2.5 per chip and hour" in capsys.readouterr().out
    assert report(tiny_run, "--price-per-chip-hour", "-1") == 2
    assert "price-per-chip-hour is -1" in capsys.readouterr().err


def test_samples(tiny_run, run, capsys):
    text = "the river [MASK] over [MASK]"
    (filled,) = sections.filled_masks([run], [text]).rows
    assert filled[0] == text and filled[1].count(";") == 1 and filled[1].count("%") == 2 * sections.CANDIDATES
    assert report(tiny_run, "--text", text, "--text", "a [MASK] stone") == 0
    assert text in (printed := capsys.readouterr().out) and "bread" not in printed
    without = dataclasses.replace(run, checkpoint=None)
    assert sections.filled_masks([without], [text]) is None
    (both,) = sections.filled_masks([run, without], [text]).rows
    assert both[1:] == (filled[1], settings.MISSING)


def test_settings_that_differ_from_the_preset(run):
    preset = change(run, **{name: getattr(presets.load_config("bert_tiny"), name) for name in CONFIG_FIELDS})
    assert settings.settings_table(preset.config).marked == frozenset()
    table = settings.settings_table(config_lib.replace(preset.config, model={"num_layers": 3}))
    assert [table.rows[i] for i in table.marked] == [("model.num_layers", "3", "2")] and table.header[2] == "preset"
    assert settings.settings_table(run.config).header[2] == "default"


CONFIG_FIELDS = [field.name for field in dataclasses.fields(config_lib.Config)]
CHANGES = [
    {},
    {"seed": 4, "model": {"num_layers": 3, "attention": "xla"}, "log": {"layers": False, "wandb": "a b"}},
    {
        "optimizer": {
            "bias_correction": False,
            "clip_norm": None,
            "learning_rate_scales": (("word", 0.5), ("encoder/layers/.*", 2.0)),
        },
        "phases": (Phase(steps=30, learning_rate=1e-7, warmup_steps=3, frozen=("word", "heads/.*")),),
        "name": "mine",
    },
    {"phases": (Phase(steps=3, seq_len=32), Phase(steps=5, hours=0.25)), "name": "mine"},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_the_command_repeats_the_run(run, changes):
    """The config that the command line parses is that of the run."""
    base = run.config if not changes else presets.load_config("bert_tiny")
    one = change(run, **({name: getattr(base, name) for name in CONFIG_FIELDS}))
    one = change(one, **changes)
    (command,) = settings.repeat_command(one)
    words = shlex.split(command.text.replace("\\\n", " "))
    assert words[:2] == ["bert-jax", "pretrain"]
    parsed = cli.parse("pretrain", words[2:])
    assert parsed.config == one.config
    assert parsed.corpus == (run.file["corpus_paths"][0],) and parsed.workdir != run.directory


@pytest.mark.parametrize(("given", "proposed"), [("runs/first", "runs/first-again"), (".", "workdir-again")])
def test_the_command_has_another_directory(run, given, proposed):
    (command,) = settings.repeat_command(dataclasses.replace(run, directory=pathlib.Path(given)))
    assert f"--workdir {proposed} " in command.text


def test_commands_without_a_preset(run):
    five = change(run, phases=(Phase(steps=3, seq_len=32),) * 5)
    assert isinstance(settings.repeat_command(five)[0], Note)
    head = TaskHead("classification", ("no", "yes"), "pooled")
    options = FinetuneOptions(epochs=2.0, text_columns=("a b", "c"), mix=True, bias_correction=False, clip_norm=None)
    task = FinetuneConfig("rte", head, "bert", 16, 64, flags=options.flags())
    (command,) = settings.repeat_command(change(run, finetune=task, start={"source": "runs/first"}))
    words = shlex.split(command.text.replace("\\\n", " "))
    parsed = cli.parse("finetune", words[2:])
    assert (str(parsed.model), parsed.task, parsed.options) == ("runs/first", "rte", options)


@pytest.mark.slow
def test_several_runs(two, tmp_path):
    page = tmp_path / "page.html"
    assert report(*two, "--out", page) == 0
    shown = sections.run_sections(read_runs(two), ())
    assert table_of(shown, "Runs first, second")["seed"] == ("0", "7") and "Settings" not in [s.title for s in shown]
    loss = table_of(shown[:2], "Final metrics")
    name = next(name for name in loss if name.startswith("mlm_loss"))
    assert loss[name][1].endswith("(+0.5)")
    pair = next(name for name in loss if name.startswith("pair_accuracy"))
    assert loss[pair][1] == settings.MISSING
    (curves,) = (one for one in metric_blocks.held_out_curves(read_runs(two)) if one.title == "mlm_loss, held out")
    assert [one.name for one in curves.series] == ["first", "unigram, first", "second"], (
        "one baseline for the same rows"
    )
    assert not [block for block in shown[0].blocks if isinstance(block, Note) and block.warning]


@pytest.mark.parametrize(
    ("file", "changed", "reason"),
    [
        ("config.json", lambda f: f | {"corpora": {"f" * 64: 1.0}}, "other corpora"),
        (
            "config.json",
            lambda f: f | {"config": f["config"] | {"evaluation": {"every": 4, "rows": 9, "batch_size": 8}}},
            "held-out rows",
        ),
        ("tokenizer.json", None, "another tokenizer"),
    ],
)
def test_runs_that_cannot_be_compared(two, other_corpus, file, changed, reason):
    if changed is None:
        shutil.copy(other_corpus / file, two[1] / file)
    else:
        edit(two[1] / file, changed)
    (note,) = settings.comparison_warnings(read_runs(two))
    assert note.warning and reason in note.text and "second cannot be compared with those of first" in note.text
    assert sections.run_sections(read_runs(two), ())[0].blocks[0] == note


def test_fine_tuning_metrics_need_no_names(two):
    """Lines with metrics that pretraining does not have."""

    def tuned(line):
        kept = {name: line[name] for name in ("step", "split", "timing")}
        return kept | ({"matthews": None} if line["step"] < 5 else {"matthews": 0.25, "labels": "x"})

    edit(two[0] / "metrics.jsonl", tuned)
    head = {"kind": "classification", "labels": ["a", "b"], "reads": "cls", "activation": "none", "norm": False}
    task = {"task": "cola", "head": head, "family": "bert", "batch_examples": 4, "max_length": 32, "new_head": True}
    task |= {"new_layers": 0, "flags": [], "data_sha256": "", "source_sha256": ""}
    edit(two[0] / "config.json", lambda file: file | {"config": file["config"] | {"finetune": task}})
    runs = read_runs(two[:1])
    shown = sections.run_sections(runs, sections.TEXTS)
    assert table_of(shown, "Final metrics") == {"matthews": ("0.25", "0.25", "")}
    assert [one.title for one in metric_blocks.held_out_curves(runs)] == ["matthews, held out"]
    assert "Filled masks" not in [section.title for section in shown] and "<svg" in html.render(shown)
    assert "another task" in settings.comparison_warnings(read_runs(two))[0].text


LEDGER = [
    (
        {"event": "rollback", "reason": "loss 9", "step": 6, "to": 4, "skipped_rows": [8, 1600]},
        "Rollback to step 4, and rows 8 to 1,600 were skipped: loss 9.",
    ),
    (
        {"event": "rollback", "reason": "device 2 differs", "step": 6, "to": 4, "skipped_rows": None},
        "Rollback to step 4, and no rows were skipped: device 2 differs.",
    ),
    (
        {
            "event": "micro_batch",
            "phase": 0,
            "devices": 8,
            "device": "TPU v4",
            "accumulation": 4,
            "bytes": 2**30,
            "limit": 2**31,
        },
        "Phase 0 on 8 x TPU v4: 4 micro-batches per step, 1.00 of 2.00 GiB on each device.",
    ),
    ({"event": "micro_batch", "accumulation": 4}, "Phase ? on ? x ?: 4 micro-batches per step."),
    (
        {"event": "time", "step": 3, "hours": 24.0, "seconds": 2.0, "end": 7},
        "Time limit of 24 hours: by the estimate at step 3, the run ends after step 7.",
    ),
    ({"event": "other", "value": 3}, "other: value 3."),
]


@pytest.mark.parametrize(("entry", "words"), LEDGER)
def test_decisions_in_words(run, entry, words):
    shown = sections.run_sections([dataclasses.replace(run, decisions=[entry, dict(entry)])], ())
    (section,) = (one for one in shown if one.title == "Decisions")
    assert section.blocks == (Note(words),) * (1 if entry["event"] == "time" else 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint": None}, "not finished: step 8 of 8, last checkpoint at step 0. It is stopped"),
        ({"checkpoint": {"ended": "time", "cursor": {"step": 6}}}, "finished after step 6: the time limit is reached"),
        (
            {"checkpoint": {"ended": "steps", "cursor": {"step": 6}}},
            "not finished: step 8 of 8, last checkpoint at step 6",
        ),
        ({"checkpoint": {"ended": "", "cursor": {"step": 4}}, "locked": True}, "The run is active, or was killed"),
        (
            {"task_score": run_files.TaskScore({"best_epoch": {"step": 4, "epoch": 1.0}}, 0.5), "checkpoint": None},
            "finished after step 8: the weights of step 4 are kept, the best epoch",
        ),
    ],
)
def test_states(run, changes, words):
    assert words in dataclasses.replace(run, **changes).state


def test_hostile_names_are_escaped(two, tmp_path):
    hostile = tmp_path / HOSTILE.replace("/", "")
    shutil.copytree(two[1], hostile)
    edit(hostile / "config.json", lambda file: file | {"corpus_paths": [HOSTILE]})
    edit(hostile / "metrics.jsonl", lambda line: line | {HOSTILE: 1.0})
    edit(hostile / "goodput.jsonl", lambda line: line | {"environment": {HOSTILE: HOSTILE}})
    content = html.render(sections.run_sections(read_runs([two[0], hostile]), ()))
    assert "<script" not in content and content.count("&lt;script&gt;") > 20


@pytest.mark.parametrize(
    ("name", "place", "text", "score"),
    [
        ("seed3", "..", '{"baseline": 0.5, "seeds": [{"seed": 3, "score": 0.75, "failed": false}]}', 0.75),
        ("seed3", ".", '{"baseline": 0.5, "seeds": [{"seed": 3, "score": null, "failed": true}]}', None),
        ("mine", "..", '{"baseline": 0.5, "seeds": [{"seed": 3, "score": 0.75, "failed": false}]}', "no result"),
        ("mine", "..", '{"of": "another program"}', "no result"),
    ],
)
def test_results_of_another_directory_are_not_those_of_a_run(tmp_path, name, place, text, score):
    """Only the results above the directories of seeds are."""
    (tmp_path / name).mkdir()
    (tmp_path / name / place / "results.json").write_text(text)
    found = run_files._read_task_score(tmp_path / name, 3)
    assert ("no result" if found is None else found.result["score"]) == score


def test_many_lines_are_thinned():
    steps, values = metric_blocks._thinned(list(range(2501)), [float(i) for i in range(2501)])
    assert len(steps) <= metric_blocks.MAX_POINTS and steps[-1] == 2500 and values == tuple(map(float, steps))


def test_damaged_lines_are_skipped_with_a_warning(two, capsys):
    path = two[0] / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{damaged", *lines[1:]]) + "\n")
    assert len(read_runs(two[:1])[0].lines) == len(lines)
    assert f"warning: {path}: line 2 is incomplete or damaged; skipped" in capsys.readouterr().err


MISTAKES = [
    ("", "report needs WORKDIR"),
    ("absent", "absent holds no run of bert_jax"),
    (
        "many",
        "many holds no run of bert_jax (there is no config.json); its directories hold runs, give those: many/first ",
    ),
    ("empty", "empty has no metrics yet"),
    ("torn", "torn/config.json"),
    ("first first/../first", "is the same directory as first: give it once"),
    ("first link", "link is the same directory as first: give it once"),
    ("first --out absent/page.html", "--out absent/page.html: there is no directory absent"),
    ("first --out mine.txt", "--out mine.txt: exists already and is not a page of bert_jax"),
    ("first --out second", "--out second: is a directory"),
    ("first study", "study is a study: give it alone"),
    ("study --text [MASK]", "--text is for runs"),
    ("first --text none", "the text has no [MASK]"),
    ("first --text [MASK] --no-samples", "--text and --no-samples contradict each other"),
]


def test_mistakes(two, tmp_path, monkeypatch, capsys):
    """One line and exit code 2; no file is written."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "torn"):
        shutil.copytree(two[0], tmp_path / name)
    (tmp_path / "empty/metrics.jsonl").write_text("")
    (tmp_path / "torn/config.json").write_text("{")
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "link").symlink_to("first")
    (tmp_path / "many").mkdir()
    for name in ("first", "second"):
        (tmp_path / "many" / name).symlink_to(two[0])
    (tmp_path / "study").mkdir()
    (tmp_path / "study/study.json").write_text("{}")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for line, message in MISTAKES:
        assert report(*line.split()) == 2, line
        error = capsys.readouterr().err.splitlines()
        assert len(error) == 1 and message in error[0], line
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_studies(tmp_path, monkeypatch, capsys):
    """The hook of a study's report."""
    (tmp_path / "study.json").write_text("{}")
    module = types.ModuleType("bert_jax.experiments.study_report")
    module.sections = lambda directory: [Section(f"Study {directory.name}", (Note("A verdict."),), level=1)]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("bert_jax.experiments.study_report", module, raising=False)
    assert report(tmp_path) == 0
    assert f"Study {tmp_path.name}" in capsys.readouterr().out


def test_terminal(run):
    printed = text.render(sections.run_sections([run], ()))
    assert "* model.hidden_size " in printed and "  model.rotary_base " in printed
