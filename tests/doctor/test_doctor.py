"""`bert-jax doctor`: its figures against a slow count over the rows, its levels, and its two output formats."""

import dataclasses
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.cli import main as cli
from bert_jax.config import Config, DataConfig, ObjectiveConfig, Phase
from bert_jax.data import epoch_plan as plan_module
from bert_jax.data.batch import empty_rows
from bert_jax.data.batches import TrainingStream
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import CorpusPosition, Cursor
from bert_jax.data.epoch_counts import measure_epoch
from bert_jax.data.epoch_plan import EpochPlanner
from bert_jax.data.mixture import CorpusWeight, MixtureOrder
from bert_jax.data.row_reader import CorpusRows
from bert_jax.doctor.check_context import ONE_DEVICE, CheckContext
from bert_jax.doctor.data_checks import streams
from bert_jax.doctor.doctor import DoctorOptions, check_run, run_summary
from bert_jax.doctor.epochs import rows_by_phase_and_corpus
from bert_jax.training import loop
from bert_jax.training.run_directory.workdir import read_config
from tests.data.memory import FIRST, SPECIAL_IDS, make_corpus, random_documents

FORMATS = ["segment_pair", "sentence_pair", "sentence_order", "full_sentences", "doc_sentences"]
PAIRS = {"segment_pair": "nsp", "sentence_pair": "nsp", "sentence_order": "sop"}


@pytest.fixture
def small(monkeypatch):
    """Chunks and windows small enough that a test's corpus has many."""
    monkeypatch.setattr(plan_module, "CHUNK_TOKENS", 200)
    monkeypatch.setattr(plan_module, "WINDOW_CHUNKS", 4)


def counted(corpus, data: DataConfig, seq_len: int, windows=None) -> dict[str, int]:
    """Fields of `EpochStatistics` counted over the rows; every token of a `make_corpus` has a unique id."""
    rows_of_corpus, covered = CorpusRows(corpus, data, SPECIAL_IDS, 0), []
    document_of = np.repeat(np.arange(corpus.num_documents), np.diff(corpus.document_offsets))
    document_of = np.repeat(document_of, corpus.sentence_lengths)
    found = dict.fromkeys(("examples", "rows", "filled", "labelled", "negatives"), 0)
    for index in range(rows_of_corpus.epoch_planner(seq_len).windows) if windows is None else windows:
        start = CorpusPosition(0, index, 0)
        count = len(rows_of_corpus.window(seq_len, start).window)
        rows = empty_rows(count, seq_len, data.max_examples_per_row(seq_len), SPECIAL_IDS.pad_id)
        rows_of_corpus.read_into(rows, np.arange(count), start, count)
        found["rows"] += count
        found["filled"] += int((rows["input_ids"] != SPECIAL_IDS.pad_id).sum())
        for row, slot in product(range(count), range(data.max_examples_per_row(seq_len))):
            if rows["example_id"][row, slot] < 0:
                continue
            found["examples"] += 1
            found["labelled"] += int(rows["pair_labels"][row, slot] != -1)
            found["negatives"] += int(rows["pair_labels"][row, slot] == 1)
            mine = rows["segment_ids"][row] == slot + 1
            a, b = (rows["input_ids"][row][mine & (rows["token_type_ids"][row] == kind)] - FIRST for kind in (0, 1))
            a, b = a[a >= 0], b[b >= 0]
            covered += a.tolist()
            # A random segment is of another document, and nothing else is.
            if len(b) and document_of[b[0]] == document_of[a[0]]:
                covered += b.tolist()
    assert len(set(covered)) == len(covered)
    return found | {"covered": len(covered)}


@pytest.mark.parametrize("form", ["segment_pair", "doc_sentences"])
def test_a_sample_counts_its_windows(small, form):
    """Evenly spaced, counted right, and scaled to the epoch."""
    corpus = make_corpus(random_documents(2, 600, longest=14))
    data = DataConfig(format=form)
    plan = EpochPlanner(corpus, data, 32, 0)
    counts, every = measure_epoch(plan, budget=corpus.num_tokens // 3 + 1), measure_epoch(plan)
    assert counts.all_windows == plan.windows > 20 and counts.windows == plan.windows // 3
    step = plan.windows / counts.windows
    chosen = [int(step * (i + 0.5)) for i in range(counts.windows)]
    expected = counted(corpus, data, 32, chosen)
    assert {name: getattr(counts, name) for name in expected} == expected
    assert counts.tokens < counts.all_tokens == corpus.num_tokens
    assert counts.rows * counts.scale_factor == pytest.approx(every.rows, rel=0.03)
    assert measure_epoch(plan, budget=1).windows == 1


SHORT = (Phase(steps=3, seq_len=32, batch_size=20),)


def config_of(form="segment_pair", phases=SHORT, **data) -> Config:
    objective = ObjectiveConfig(pair=PAIRS.get(form, "none"))
    return Config(name="x", objective=objective, data=DataConfig(format=form, **data), phases=phases)


def findings_of(corpora, config, shares=(1.0,)):
    return list(streams(CheckContext(config, list(corpora), MixtureOrder(shares))))


@pytest.mark.parametrize(
    ("form", "slots"), [("segment_pair", 1), ("segment_pair", 8), *((form, 3) for form in FORMATS[1:])]
)
def test_findings_have_the_counted_figures(small, form, slots):
    corpus, phases = make_corpus(random_documents(4, 150, longest=20)), (Phase(seq_len=12), Phase(seq_len=64))
    config = config_of(form, phases, examples_per_row=slots)
    findings = findings_of([corpus], config)
    assert [finding.name for finding in findings] == ["rows", "coverage", "packing", "pairs", "epochs"] * 2
    for number, phase in enumerate(phases):
        truth = counted(corpus, config.data, phase.seq_len)
        alone = counted(corpus, DataConfig(format=form, examples_per_row=1), phase.seq_len)
        found = {finding.name: finding.values for finding in findings if finding.values["phase"] == number}
        assert all(values["corpus"] == "memory" for values in found.values())
        assert all(values["seq_len"] == phase.seq_len for values in found.values())
        assert found["rows"]["rows_per_epoch"] == truth["rows"]
        assert found["rows"]["examples_per_epoch"] == truth["examples"]
        assert found["rows"]["steps_per_epoch"] == truth["rows"] / phase.batch_size
        assert found["coverage"]["covered"] == truth["covered"] / corpus.num_tokens
        assert found["coverage"]["covered"] + found["coverage"]["truncated"] == pytest.approx(1, abs=1e-12)
        assert found["coverage"]["truncated"] == 0 or form in PAIRS
        assert found["packing"]["packing_efficiency"] == pytest.approx(truth["filled"] / truth["rows"] / phase.seq_len)
        assert found["packing"]["unpacked_efficiency"] == pytest.approx(alone["filled"] / alone["rows"] / phase.seq_len)
        assert found["pairs"]["unlabelled"] == 1 - truth["labelled"] / truth["examples"]
        if form in PAIRS:
            assert found["pairs"]["negatives"] == truth["negatives"] / truth["labelled"]
            assert found["pairs"]["expected_negatives"] == 0.5 + 0.5 * found["pairs"]["single_chunks"]


@pytest.mark.parametrize("steps", [1, 40])
def test_epochs_of_a_phase_are_those_of_the_stream(small, steps):
    """Up to the few rows by which epochs of one corpus differ."""
    ramp = Phase(steps=steps, seq_len=32, batch_size=12, start_batch_size=4, ramp_steps=6, accumulation=3)
    config = config_of(phases=(ramp, Phase(steps=9, seq_len=64, batch_size=30), Phase(steps=1, seq_len=32)))
    corpora = [make_corpus(random_documents(i, count), name=str(i)) for i, count in enumerate((12, 60))]
    stream = TrainingStream(corpora, (0.35, 0.65), config, SPECIAL_IDS)
    found = [finding.values for finding in findings_of(corpora, config, (0.35, 0.65)) if finding.name == "epochs"]
    cursor = stream.normalize_cursor(Cursor())
    while cursor.step < config.total_steps - 1:
        before, cursor = cursor, stream.next_cursor(cursor)
        if cursor.phase == before.phase:
            continue
        for i, position in enumerate(cursor.positions):
            now, ended = (
                next(values for values in found if values["corpus"] == str(i) and values["phase"] == phase)
                for phase in (cursor.phase, before.phase)
            )
            assert abs(now["first_epoch"] - position.epoch) <= 1
            assert position.epoch - 1.2 < ended["first_epoch"] + ended["epochs"] < position.epoch + 0.2


def test_rows_of_each_corpus_by_phase():
    config = config_of(phases=(Phase(steps=333, batch_size=7), Phase(steps=41, batch_size=9)))
    orders = MixtureOrder([0.2, 0.5, 0.3]), MixtureOrder([0.6, 0.4, 0.0])
    bounds = (0, 2331), (2331, 369)
    expected = [np.bincount(o.corpus_of_rows(*bound), minlength=3) for o, bound in zip(orders, bounds, strict=True)]
    assert expected[1][2] == 0
    np.testing.assert_array_equal(rows_by_phase_and_corpus(config, orders), expected)


def level_of(findings, name) -> str:
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding.level


def test_warnings(small):
    """Each warning appears where there is a reason for it, and only there."""
    plain = make_corpus(random_documents(6, 100, most=40))
    findings = findings_of([plain], config_of(phases=(Phase(steps=40, seq_len=64, batch_size=8),)))
    assert [finding.level for finding in findings] == ["ok"] * 5
    epoch = findings[0].values["rows_per_epoch"]
    for rows, level in ((39 * epoch, "ok"), (42 * epoch, "warning")):
        many = findings_of([plain], config_of(phases=(Phase(steps=rows, seq_len=64, batch_size=1),)))
        assert level_of(many, "epochs") == level
        # Two phases together, of which none alone makes more than 40.
        halves = (Phase(steps=rows // 2, seq_len=64, batch_size=1),) * 2
        assert [finding.level for finding in findings_of([plain], config_of(phases=halves))][4::5] == ["ok", level]
    lone = findings_of([make_corpus([[20]] * 90)], config_of())
    assert level_of(lone, "pairs") == "warning" and level_of(lone, "coverage") == "ok"
    assert [lone[3].values[name] for name in ("negatives", "expected_negatives", "single_chunks")] == [1, 1, 1]
    long = findings_of([make_corpus([[28] * 30] * 20)], config_of())
    assert level_of(long, "coverage") == "warning"
    short = make_corpus([[3, 3]] * 200)
    for slots, level in ((2, "warning"), (8, "ok"), (1, "ok")):
        four = (Phase(steps=3, seq_len=36, batch_size=20),)
        findings = findings_of([short], config_of("sentence_pair", four, examples_per_row=slots))
        assert level_of(findings, "packing") == level, findings[2]


def test_findings_of_a_sample_name_it(small):
    corpus = make_corpus(random_documents(2, 400))
    context = CheckContext(config_of(), [corpus], MixtureOrder([1.0]), planned_tokens=corpus.num_tokens // 4)
    windows = EpochPlanner(corpus, DataConfig(), 32, 0).windows
    for finding in streams(context):
        assert finding.text.startswith(f"memory, phase 0, from {windows // 4} of {windows} windows: ")


@pytest.fixture(scope="module")
def preset(tmp_path_factory, tiny_config):
    path = tmp_path_factory.mktemp("preset") / "tiny.py"
    text = repr(json.dumps(config_lib.to_dict(tiny_config)))
    path.write_text("import json\nfrom bert_jax.config import from_dict\n")
    with path.open("a") as file:
        file.write(f"def config():\n    return from_dict(json.loads({text}))\n")
    return str(path)


def test_the_command(preset, tiny_corpus, tiny_config, capsys):
    args = ["doctor", preset, "--corpus", str(tiny_corpus), "--phases.0.steps", "5"]
    assert cli.main(args) == 0
    printed = capsys.readouterr().out.splitlines()
    assert cli.main([*args, "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [line.split()[1] for line in printed] == [line["name"] for line in findings]
    # What memory is free changes between the two.
    assert all(one["text"] in line for one, line in zip(findings, printed, strict=True) if one["name"] != "memory")
    values = {line["name"]: line["values"] for line in findings}
    assert values.keys() >= {"mixture", "files", "vocabulary", "rows", "coverage", "held-out"}
    counts = measure_epoch(EpochPlanner(Corpus.open(tiny_corpus), tiny_config.data, 32, tiny_config.seed))
    assert values["rows"]["rows_per_epoch"] == counts.rows
    assert values["epochs"]["epochs"] == pytest.approx(5 * 8 / counts.rows, rel=0.1)
    assert values["held-out"] == {"corpus": "corpus", "rows": 12, "hosts": 1} and values["mixture"]["shares"] == {
        "corpus": 1.0
    }


def test_what_pretrain_prints_before_its_first_step(tiny_config, tiny_corpus):
    """About ten lines of the same findings, with doctor's warnings among them."""
    once = config_lib.replace(tiny_config, phases=(dataclasses.replace(tiny_config.phases[0], steps=1_000_000),))
    lines = list(run_summary(once, [CorpusWeight(tiny_corpus)], None))
    named = [line.split()[0] for line in lines if not line.startswith("warning: ")]
    assert named == ["model", "mesh", "memory", "time", "mixture", "vocabulary", "rows"]
    (epochs,) = [line for line in lines if line.startswith("warning: epochs: ")]
    assert "its 1,000,000 steps make about" in epochs and "more than the 40" in epochs
    assert f"{Corpus.open(tiny_corpus).num_tokens:,} tokens" in lines[4] and len(lines) < 15


@pytest.mark.parametrize("way", ["preset", "flag", "file"])
def test_a_preset_has_the_vocabulary_of_its_corpus(way, preset, tiny_corpus, tmp_path, monkeypatch, capsys):
    """Unless a flag sets another size; a config file has its own. The size is in config.json and on stderr."""
    monkeypatch.setattr(loop, "train", lambda *_, **__: loop.Progress(Cursor(), 0, 0, 0, 0, {}))
    own = tmp_path / "own.py"
    own.write_text(Path(preset).read_text().replace('"vocab_size": 120', '"vocab_size": 130'))
    flags = ["--model.vocab-size", "150"] if way == "flag" else []
    tokens = Corpus.open(tiny_corpus).vocab_size
    name, size = {"preset": ("bert_tiny", tokens), "flag": ("bert_tiny", 150), "file": (str(own), 130)}[way]
    command = ["pretrain", name, "--corpus", str(tiny_corpus), "--workdir", str(tmp_path / "run"), *flags]
    assert cli.main(command) == 75
    stderr = capsys.readouterr().err
    assert read_config(tmp_path / "run").model.vocab_size == size
    assert f"\nvocabulary  {tokens} token ids; the model has {size} embeddings\n" in stderr
    if way == "preset":
        assert cli.main(["doctor", *command[1:], "--json"]) == 0
        values = {line["name"]: line["values"] for line in json.loads(capsys.readouterr().out)}
        assert values["vocabulary"] == {"tokenizer": tokens, "model": size}


def test_a_mixture(tiny_corpus, second_corpus, tiny_config):
    """The order of the flags has no effect."""
    parts = [CorpusWeight(tiny_corpus, 3.0), CorpusWeight(second_corpus, 1.0)]
    findings, reordered = (
        list(check_run(tiny_config, order, DoctorOptions(), ONE_DEVICE, [{"host": "h"}]))
        for order in (parts, parts[::-1])
    )
    assert findings == reordered
    assert not [finding for finding in findings if finding.level == "error"]
    (mixture,) = (finding for finding in findings if finding.name == "mixture")
    assert mixture.values["shares"] == {"corpus": 0.75, "second": 0.25}
    weighted = config_lib.replace(tiny_config, data={"language_weights": (("en", 0.5),)})
    (mixture,) = (
        one for one in check_run(weighted, parts, DoctorOptions(), ONE_DEVICE, [{"host": "h"}]) if one.name == "mixture"
    )
    tokens = Corpus.open(tiny_corpus).num_tokens
    assert f"an epoch of corpus has {tokens:,} tokens by its weights (en 100.0%)" in mixture.text
    unknown = config_lib.replace(tiny_config, data={"language_weights": (("de", 0.5),)})
    (wrong,) = (
        one for one in check_run(unknown, parts, DoctorOptions(), ONE_DEVICE, [{"host": "h"}]) if one.name == "mixture"
    )
    assert wrong.level == "error" and "no document has the language 'de'" in wrong.text


@pytest.mark.parametrize(
    ("flags", "name", "words"),
    [
        (["--corpus", "{tiny}", "--corpus", "{other}"], "corpora", "both named 'corpus'"),
        (["--corpus", "/nowhere"], "corpora", "no such corpus"),
        ([], "corpora", "add --corpus DIR"),
        (["--corpus", "{tiny}", "--model.vocab-size", "90"], "vocabulary", "set --model.vocab-size"),
    ],
)
def test_errors(preset, tiny_corpus, other_corpus, capsys, flags, name, words):
    flags = [flag.format(tiny=tiny_corpus, other=other_corpus) for flag in flags]
    assert cli.main(["doctor", preset, *flags]) == 2
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.startswith("error"))
    assert line.split()[1] == name and words in line
    assert {"rate", "mesh", "disk"} <= {line.split()[1] for line in lines}, "the other checks still run"
