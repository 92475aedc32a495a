"""The fine-tuning job: every kind of task is learned, continued after a kill, exported, and refused in one line."""

import dataclasses
import json
import re
import shutil
import signal

import numpy as np
import pytest
from etils import epath

import bert_jax
from bert_jax.cli import main as cli
from bert_jax.convert.conversion import convert
from bert_jax.convert.formats import input_formats
from bert_jax.errors import UserError
from bert_jax.finetune import finetune, glue
from bert_jax.finetune.label_order import in_order_of_task
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.split_files import hash_files
from bert_jax.finetune.task_data import score
from bert_jax.finetune.tasks import open_task
from bert_jax.interventions import importance_data, task_evaluation
from bert_jax.report import text
from bert_jax.run_report import run_files, sections, seeds
from bert_jax.training.param_paths import name_leaves
from bert_jax.training.run_directory.workdir import read_config
from tests.finetune import task_files
from tests.runs import Killed, committed, kill_after, numbers, read_results

pytestmark = pytest.mark.usefixtures("quick_compilation")
OPTIONS = FinetuneOptions(steps=40, batch_size=16, learning_rate=5e-3, dropout=0.0)


@pytest.fixture
def folder(task_folder):
    return task_folder


def test_classification(sst2_run):
    result = json.loads((sst2_run / "results.json").read_text())
    assert result["mean"] > 0.9 > result["baseline"] and result["failed"] == 0 and result["standard_deviation"] is None
    lines = [json.loads(line) for line in (sst2_run / "predictions/dev.jsonl").read_text().splitlines()]
    correct = [line["label"] == line["prediction"] for line in lines]
    assert np.mean(correct) == result["mean"] == numbers(sst2_run, "validation")[-1]["accuracy"]
    assert all(line["prediction"] == "01"[int(np.argmax(line["logits"]))] for line in lines)
    submission = (sst2_run / "predictions/SST-2.tsv").read_text().splitlines()
    assert submission[0] == "index\tprediction" and len(submission) == 1 + task_files.COUNTS["test"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "files", "metric", "least"),
    [("tagging", "tagging", "f1", 0.9), ("squad", "squad2", "unanswerable_f1", 60.0)],
    ids=["tagging", "squad"],
)
def test_tokens_and_spans(task, files, metric, least, folder, tiny_run, tmp_path):
    options = dataclasses.replace(OPTIONS, steps=60)
    result = finetune.finetune(tiny_run, task, folder / files, tmp_path / "run", options)
    assert result.seeds[0].metrics[metric] > least and not result.seeds[0].failed
    predictions = tmp_path / "run/predictions"
    if task == "tagging":
        line = json.loads((predictions / "dev.jsonl").read_text().splitlines()[0])
        assert len(line["words"]) == len(line["predictions"])
        return
    predicted = json.loads((predictions / "dev.json").read_text())
    contexts = {
        question["id"]: paragraph["context"]
        for paragraph in json.loads((folder / files / "dev.json").read_text())["data"][0]["paragraphs"]
        for question in paragraph["qas"]
    }
    assert predicted.keys() == contexts.keys() and all(predicted[name] in contexts[name] for name in contexts)
    assert json.loads((predictions / "test.json").read_text()).keys()
    nbest = json.loads((predictions / "dev_nbest.json").read_text())
    assert all(len(answers) > 1 for answers in nbest.values())


@pytest.mark.slow
def test_a_multiple_choice(tiny_run, tmp_path):
    """Learned; the logits of packed rows are those of single texts, and their loss the cross-entropy of the endings."""
    data = task_files.write_choices(tmp_path / "data")
    options = dataclasses.replace(OPTIONS, steps=60)
    result = finetune.finetune(tiny_run, "multiple_choice", data, tmp_path / "run", options)
    assert result.seeds[0].score > 0.8 and not result.seeds[0].failed
    lines = [json.loads(line) for line in (tmp_path / "run/predictions/dev.jsonl").read_text().splitlines()]
    packed = np.array([line["logits"] for line in lines])
    encoder = finetune.read_source(tmp_path / "run")
    opened, _ = open_task("multiple_choice", data, FinetuneOptions(), encoder)
    examples = opened.splits["dev"].examples
    alone = task_evaluation.task_logits(bert_jax.load(tmp_path / "run"), examples, range(len(examples.lengths)))
    np.testing.assert_allclose(np.concatenate(alone).reshape(-1, 3), packed, rtol=0, atol=1e-4)
    sums = numbers(tmp_path / "run", "train")
    assert {"task_loss", "task_accuracy"} <= sums[-1].keys()
    with pytest.raises(UserError, match="task multiple_choice: the importance of heads and layers needs tasks with"):
        importance_data.open_task(bert_jax.load(tmp_path / "run"), data, "multiple_choice", FinetuneOptions(), 0, None)
    assert convert(tmp_path / "run", tmp_path / "exported", "huggingface").passed
    assert json.loads((tmp_path / "exported/config.json").read_text())["architectures"] == ["BertForMultipleChoice"]
    with input_formats.open_model(tmp_path / "exported") as again, input_formats.open_model(tmp_path / "run") as run:
        assert again.model.heads.task == run.model.heads.task


@pytest.mark.slow
def test_several_labels(tiny_run, tmp_path):
    """Learned, scored on dev and test, and exported as what transformers applies a sigmoid to."""
    data = task_files.write_multilabel(tmp_path / "data")
    options = dataclasses.replace(OPTIONS, steps=80)
    result = finetune.finetune(tiny_run, "multilabel", data, tmp_path / "run", options)
    (seed,) = result.seeds
    assert seed.class_f1["dev"]["place"] > 0.8 and seed.score == np.mean([*seed.metrics.values()])
    assert seed.test_metrics.keys() == seed.metrics.keys() and seed.class_f1["dev"].keys() == {"place", "thing"}
    lines = [json.loads(line) for line in (tmp_path / "run/predictions/dev.jsonl").read_text().splitlines()]
    assert all((np.array(line["logits"]) > 0).sum() == len(line["prediction"]) for line in lines)
    assert numbers(tmp_path / "run", "train")[-1]["task_accuracy"] > 0.5
    assert convert(tmp_path / "run", tmp_path / "exported", "huggingface").passed
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["problem_type"] == "multi_label_classification" and config["id2label"] == {"0": "place", "1": "thing"}
    with input_formats.open_model(tmp_path / "exported") as again, input_formats.open_model(tmp_path / "run") as run:
        assert again.model.heads.task == run.model.heads.task and run.model.heads.task.kind == "multilabel"


@pytest.mark.slow
def test_the_best_epoch_by_a_part_of_train(folder, tiny_run, tmp_path, tiny_programs):
    """Each seed holds out another part, dev is scored once, and the checkpoint is that of the best epoch."""
    options = dataclasses.replace(OPTIONS, steps=20, selection_share=0.25, seeds=2)
    data = folder / "sst2"
    result = finetune.finetune(tiny_run, "sst2", data, tmp_path / "run", options)
    for seed in result.seeds:
        run = tmp_path / f"run/seed{seed.seed}"
        lines = numbers(run, "validation")
        assert [line["step"] for line in lines] == [3, 6, 9, 12, 15, 18, 20] and "accuracy" not in lines[0]
        scores = [line["selection/accuracy"] for line in lines]
        best = lines[int(np.argmax(scores))]["step"]
        assert committed(run) == [best]
        assert seed.best_epoch == {"step": best, "epoch": round(best / 3, 2), "score": max(scores), "examples": 16}
        encoder = finetune.read_source(run)
        opened, _ = open_task("sst2", data, FinetuneOptions(max_length=64), encoder)
        assert task_evaluation.task_score(bert_jax.load(run), opened) == seed.score
    assert (
        json.loads((tmp_path / "run/results.json").read_text())["seeds"][0]["best_epoch"] == result.seeds[0].best_epoch
    )
    again = finetune.finetune(tiny_run, "sst2", data, tmp_path / "run", options)
    assert [one.to_dict() for one in again.seeds] == [one.to_dict() for one in result.seeds]
    with pytest.raises(Killed):
        finetune.finetune(
            tiny_run,
            "sst2",
            data,
            tmp_path / "one",
            dataclasses.replace(options, seeds=1),
            make_programs=tiny_programs(after_step=kill_after(10)),
        )
    killed = finetune.finetune(tiny_run, "sst2", data, tmp_path / "one", dataclasses.replace(options, seeds=1))
    assert killed.seeds[0].to_dict() == result.seeds[0].to_dict()


@pytest.mark.slow
def test_a_labelled_test_split(folder, tiny_run, tmp_path):
    """Scored once, beside dev; here it is dev."""
    shutil.copytree(folder / "sst2", tmp_path / "sst2")
    (tmp_path / "sst2/test.tsv").write_bytes((tmp_path / "sst2/dev.tsv").read_bytes())
    options = dataclasses.replace(OPTIONS, steps=20)
    result = finetune.finetune(tiny_run, "sst2", tmp_path / "sst2", tmp_path / "run", options)
    results = json.loads((tmp_path / "run/results.json").read_text())
    (seed,) = results["seeds"]
    assert seed["test_score"] == seed["score"] == results["test_mean"] and seed["test_metrics"] == seed["metrics"]
    assert not any("test" in name for line in numbers(tmp_path / "run", "validation") for name in line)
    assert f"test {seed['score']:.4f}" in finetune.summary_lines(result)[1]
    assert any(f"{seed['score']:.4f} on test" in block.text for block in _summary(tmp_path / "run"))
    again = dataclasses.replace(options, test_score="none")
    assert finetune.finetune(tiny_run, "sst2", tmp_path / "sst2", tmp_path / "run", again).seeds[0].test_score is None


@pytest.mark.slow
def test_killed_and_continued(sst2_run, folder, tiny_run, tmp_path, tiny_programs):
    """The same result, metrics and predictions, with shared steps, if more checkpoints are kept."""
    make = tiny_programs(after_step=kill_after(27))
    arguments = tiny_run, "sst2", folder / "sst2", tmp_path / "run", OPTIONS
    with pytest.raises(Killed):
        finetune.finetune(*arguments, make_programs=make)
    assert 0 < committed(tmp_path / "run")[0] < 27 and not (tmp_path / "run/results.json").exists()
    finetune.finetune(*arguments[:-1], dataclasses.replace(OPTIONS, keep=3))
    assert numbers(tmp_path / "run") == numbers(sst2_run) != []
    assert committed(tmp_path / "run")[:3] == [40, 36, 32] and committed(sst2_run)[1] < 36
    _same_results(tmp_path / "run", sst2_run)


@pytest.mark.slow
@pytest.mark.parametrize(("save_every", "saved"), [(None, 24), (7, 21)])
def test_killed_in_its_only_epoch(save_every, saved, folder, tiny_run, tmp_path, tiny_programs):
    """It continues at the last tenth of the run, or at those of --save-every, bit-identical."""
    options = dataclasses.replace(OPTIONS, steps=30, batch_size=2)
    data, make = folder / "sst2", tiny_programs(after_step=kill_after(27))
    finetune.finetune(tiny_run, "sst2", data, tmp_path / "whole", options)
    killed = dataclasses.replace(options, save_every=save_every)
    with pytest.raises(Killed):
        finetune.finetune(tiny_run, "sst2", data, tmp_path / "run", killed, make_programs=make)
    assert committed(tmp_path / "run")[0] == saved
    finetune.finetune(tiny_run, "sst2", data, tmp_path / "run", options)
    assert committed(tmp_path / "run")[0] == 30
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole") != []
    _same_results(tmp_path / "run", tmp_path / "whole")


def _same_results(one, other):
    assert read_results(one) == read_results(other)
    for name in ("predictions/dev.jsonl", "predictions/SST-2.tsv"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def _change_code(path):
    """As if another version of bert_jax had trained the run."""
    other = {"version": "0.0.9", "commit": "", "sha256": "0123456789abcdef"}
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [line | {"code": other} if "code" in line else line for line in entries]
    assert changed != entries
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))


def test_options(folder, tiny_run, tmp_path):
    """Frozen encoder; a learning rate of 0 is a failed run, in the mean. A second seed is added to the first."""
    options = dataclasses.replace(OPTIONS, steps=2, learning_rate=0.0, freeze_encoder=True)
    arguments = tiny_run, "sst2", folder / "sst2", tmp_path / "run"
    finetune.finetune(*arguments, options)
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    (note,) = [block for block in _summary(tmp_path / "run") if "failed" in block.text]
    assert note.warning and "run failed: its score is 0." in note.text and "best constant prediction has" in note.text
    _change_code(tmp_path / "run/goodput.jsonl")
    options, lines = dataclasses.replace(options, seed=1), []
    result = finetune.finetune(*arguments, options, announce=lines.append).to_dict()
    (note,) = [line for line in lines if line.startswith("note: ")]
    assert "other code, which are kept: seed 0 by bert_jax 0.0.9 (SHA-256 0123456789abcdef); the rest by" in note
    made = json.loads((tmp_path / "run/results.json").read_text())["provenance"]
    assert list(made["other_code"]) == ["seed 0"] and made["configs"]["run"]["finetune"]["task"] == "sst2"
    assert made["hashes"]["files"] == hash_files(folder / "sst2")
    assert made["hashes"]["train"] == made["configs"]["run"]["finetune"]["data_sha256"]
    page = text.render(seeds.sections(tmp_path / "run"))
    assert seeds.has_seeds(tmp_path / "run") and "2 of 2 runs failed" in page and "made by other code: seed 0" in page
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before and not (tmp_path / "run/seed0").exists()
    assert any("seed1 failed: its score" in block.text for block in _summary(tmp_path / "run/seed1"))
    assert [one["seed"] for one in result["seeds"]] == [0, 1]
    assert (result["failed"], result["diverged"]) == (2, 0)
    assert result["mean"] == np.mean([one["score"] for one in result["seeds"]])
    with input_formats.open_model(tiny_run) as before, input_formats.open_model(tmp_path / "run/seed1") as after:
        tuned, source = (name_leaves(one.model.params) for one in (after, before))
        for name in tuned.keys() & source.keys():
            np.testing.assert_array_equal(tuned[name], source[name], err_msg=name)


@pytest.mark.slow
def test_the_identity_of_a_run_is_content_and_flags(folder, tiny_run, tmp_path, monkeypatch):
    """Another path of the same model is the same run; another model, or another flag, is refused without a change."""
    options = dataclasses.replace(OPTIONS, steps=1, seeds=2, freeze_encoder=True)
    data, run = folder / "sst2", tmp_path / "run"
    shutil.copytree(tiny_run, tmp_path / "model")
    finetune.finetune(tmp_path / "model", "sst2", data, run, options)
    before = read_results(run)
    monkeypatch.chdir(tmp_path)
    finetune.finetune(epath.Path("model"), "sst2", data, run, options)
    with pytest.raises(UserError, match="source_sha256"):
        finetune.finetune(run / "seed1", "sst2", data, run, options)
    with pytest.raises(UserError, match=r"finetune\.flags\.--learning-rate 0\.005 -> 0\.1\)"):
        finetune.finetune(tiny_run, "sst2", data, run, dataclasses.replace(options, learning_rate=0.1))
    assert read_results(run) == before


@pytest.mark.slow
def test_a_replaced_head_is_not_that_of_the_source(folder, tiny_run, tmp_path):
    """With equal seeds: the encoder of the source was trained for that one."""
    options = dataclasses.replace(OPTIONS, steps=1, learning_rate=0.0)
    finetune.finetune(tiny_run, "sst2", folder / "sst2", tmp_path / "first", options)
    finetune.finetune(tmp_path / "first", "sst2", folder / "sst2", tmp_path / "second", options)
    heads = []
    for name in ("first", "second"):
        with input_formats.open_model(tmp_path / name) as opened:
            heads.append(np.array(name_leaves(opened.model.params)["task/output/kernel"]))
    assert abs(heads[0] - heads[1]).max() > 0.5 * abs(heads[0]).max()


@pytest.mark.slow
def test_the_export_of_a_regression_is_named_as_one(folder, tiny_run, tmp_path):
    """Or `transformers.pipeline` would apply a sigmoid to its output."""
    options = dataclasses.replace(OPTIONS, steps=1, text_columns=("sentence",))
    finetune.finetune(tiny_run, "regression", folder / "sst2", tmp_path / "run", options)
    convert(tmp_path / "run", tmp_path / "exported", "huggingface")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["problem_type"] == "regression" and config["id2label"] == {"0": "score"}


def test_divergence_is_a_failed_run(folder, tiny_run, tmp_path, capsys):
    options, lines = dataclasses.replace(OPTIONS, steps=12, learning_rate=1e29, warmup=0.0), []
    arguments = tiny_run, "sst2", folder / "sst2", tmp_path / "run", options
    result = finetune.finetune(*arguments, announce=lines.append).to_dict()
    assert (result["failed"], result["diverged"], result["mean"]) == (1, 1, None)
    assert result["seeds"][0]["score"] is None
    assert "training diverged" in capsys.readouterr().err and (tmp_path / "run/results.json").exists()
    assert result["seeds"][0]["diverged"] and not any("not above" in line for line in lines)
    assert lines[-1] == "seed 0: diverged, so it has no score"
    (note,) = [block for block in _summary(tmp_path / "run") if "failed" in block.text]
    assert (
        note.warning and "run failed: it diverged, so it has no score; the best constant prediction has 0." in note.text
    )


def _summary(directory):
    return sections.run_sections(run_files.read_runs([directory]), ())[0].blocks


@pytest.mark.slow
def test_a_signal_between_two_seeds_stops_the_job(folder, tiny_run, tmp_path):
    """Ctrl-C or SIGTERM as the scores of the first seed are announced."""
    options = dataclasses.replace(OPTIONS, steps=1, seeds=2, freeze_encoder=True)
    arguments = tiny_run, "sst2", folder / "sst2", tmp_path / "run", options

    def send(number):
        return lambda line: signal.raise_signal(number) if line.startswith("seed 0") else None

    with pytest.raises(KeyboardInterrupt, match="stopped before seed 1; the same command continues"):
        finetune.finetune(*arguments, announce=send(signal.SIGINT))
    assert finetune.finetune(*arguments, announce=send(signal.SIGTERM)) is None
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["seed0"]
    assert len(finetune.finetune(*arguments).seeds) == 2


@pytest.mark.parametrize(
    ("there", "seeds", "expected"),
    [
        ([], [0], {0: ""}),
        ([], [0, 1], {0: "seed0", 1: "seed1"}),
        ([""], [3], {3: ""}),
        ([""], [0], {0: "seed0", 3: ""}),
        ([""], [2, 3], {2: "seed2", 3: ""}),
        (["", "seed1"], [10], {1: "seed1", 3: "", 10: "seed10"}),
        (["seed0", "seed1"], [0], {0: "seed0", 1: "seed1"}),
        (["seed0", "seed1"], [5], {0: "seed0", 1: "seed1", 5: "seed5"}),
    ],
)
def test_seeds_are_added_to_those_of_the_directory(sst2_run, tmp_path, there, seeds, expected):
    """Results are those of all runs of the work directory; here, seed 3 is in the directory itself."""
    for name in there:
        (tmp_path / name).mkdir(exist_ok=True)
        values = json.loads((sst2_run / "config.json").read_text())
        values["config"]["seed"] = int(name.removeprefix("seed") or 3)
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    (tmp_path / "seeds").mkdir()  # no run
    if there:
        (tmp_path / "report.html").write_text("")  # a file of the user beside runs
    first, last = seeds[0], seeds[-1]
    found = finetune._directories(tmp_path, range(first, last + 1))
    assert list(found.items()) == [(seed, tmp_path / name) for seed, name in expected.items()]


def test_seeds_need_a_directory_of_their_own(tmp_path, folder, tiny_run):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes.txt: choose another --workdir for --seeds"):
        finetune.finetune(tiny_run, "sst2", folder / "sst2", tmp_path, dataclasses.replace(OPTIONS, seeds=2, seed=1))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_tfds_dataset(tiny_run, tmp_path):
    """TFDS stores examples in another order than GLUE's files; predictions have that of the files."""
    task_files.write_tfds(tmp_path)
    encoder = finetune.read_source(tiny_run)
    options = FinetuneOptions().with_length(encoder.model.config, 64)
    data, _ = open_task("sst2", tmp_path, options, encoder)
    assert data.splits["dev"].examples.labels.tolist() == [0, 1, 0, 1] and len(data.train.lengths) == 6
    assert data.splits["test"].examples.lengths.tolist() == sorted(data.splits["test"].examples.lengths)
    with pytest.raises(UserError, match="has no feature 'sentence1': it has"):
        open_task("rte", tmp_path, options, encoder)


def test_a_finished_task_hands_over(sst2_run, folder, tmp_path):
    """A fine-tuned model is a source: with its head, or with a new one for other labels."""
    options = dataclasses.replace(OPTIONS, steps=1, learning_rate=0.0, keep_head=True)
    result = finetune.finetune(sst2_run, "sst2", folder / "sst2", tmp_path / "kept", options)
    assert result.seeds[0].score == json.loads((sst2_run / "results.json").read_text())["mean"]
    with pytest.raises(UserError, match=r"has the labels 0, 1 .*, the task has O, .*: leave --keep-head out"):
        finetune.finetune(sst2_run, "tagging", folder / "tagging", tmp_path / "other", options)
    assert not (tmp_path / "other").exists()


def test_a_head_with_the_labels_in_another_order(folder, sst2_run, tmp_path):
    """Its outputs are matched by the names of the labels: MNLI's are in capitals in many published models."""
    task_files.write_glue(tmp_path / "mnli", "mnli")
    encoder = finetune.read_source(sst2_run)
    labels = ("CONTRADICTION", "NEUTRAL", "Entailment")
    head = dataclasses.replace(encoder.model.heads.task, labels=labels)
    output = {"kernel": np.arange(6.0).reshape(2, 3), "bias": np.arange(3.0)}
    model = encoder.model._replace(
        heads=dataclasses.replace(encoder.model.heads, task=head),
        params=encoder.model.params | {"task": {"output": output}},
    )
    encoder, lines = encoder._replace(model=model), []
    options = FinetuneOptions().with_length(encoder.model.config, 64)
    data, _ = open_task("mnli", tmp_path / "mnli", options, encoder)
    matched = in_order_of_task(encoder.model, data, "it", "advice", lines.append)
    assert matched.heads.task.labels == data.labels == ("entailment", "neutral", "contradiction")
    assert matched.params["task"]["output"]["bias"].tolist() == [2, 1, 0]
    assert matched.params["task"]["output"]["kernel"].tolist() == [[2, 1, 0], [5, 4, 3]]
    (line,) = lines
    assert "has the labels CONTRADICTION, NEUTRAL, Entailment: matched by their names with entailment, neutral" in line
    for others in (("LABEL_0", "LABEL_1", "LABEL_2"), ("neutral", "Neutral", "entailment")):
        heads = dataclasses.replace(encoder.model.heads, task=dataclasses.replace(head, labels=others))
        with pytest.raises(
            UserError, match=r"the task has entailment, neutral, contradiction \(classification\): advice"
        ):
            in_order_of_task(model._replace(heads=heads), data, "it", "advice", lines.append)


@pytest.mark.slow
def test_training_in_int8(sst2_run, folder, tmp_path):
    """It changes logits and gradients a little; a model that was trained so stays so, unless a flag says otherwise."""
    options = dataclasses.replace(OPTIONS, steps=2, keep_head=True, learning_rate=1e-3)
    results = {}
    for name, source, dense_dtype in (
        ("float", sst2_run, None),
        ("int8", sst2_run, "int8"),
        ("again", tmp_path / "int8", None),
        ("back", tmp_path / "int8", "compute"),
    ):
        finetune.finetune(
            source, "sst2", folder / "sst2", tmp_path / name, dataclasses.replace(options, dense_dtype=dense_dtype)
        )
        lines = (tmp_path / name / "predictions/dev.jsonl").read_text().splitlines()
        results[name] = np.array([json.loads(line)["logits"] for line in lines])
    with_int8 = {name for name in results if bert_jax.load(tmp_path / name).config.dense_dtype == "int8"}
    assert with_int8 == {"int8", "again"}
    assert 1e-5 < np.abs(results["int8"] - results["float"]).max() < 0.2 * np.abs(results["float"]).max()
    assert "--dense-dtype int8" in read_config(tmp_path / "int8").finetune.flags
    logits = task_evaluation.task_logits(bert_jax.load(tmp_path / "int8"), *_dev(folder, tmp_path / "int8"))
    np.testing.assert_allclose(np.concatenate(logits), results["int8"], rtol=0, atol=1e-4)


def _dev(folder, source):
    options = FinetuneOptions().with_length(bert_jax.load(source).config, 64)
    data, _ = open_task("sst2", folder / "sst2", options, finetune.read_source(source))
    examples = data.splits["dev"].examples
    return examples, range(len(examples.lengths))


@pytest.mark.parametrize("name", task_files.GLUE_NAMES)
def test_files_of_glue(name, tiny_run, tmp_path):
    """Every task opens its published files; perfect logits have the best score, and test predictions their form."""
    directory = task_files.write_glue(tmp_path / name, name)
    encoder = finetune.read_source(tiny_run)
    options = FinetuneOptions().with_length(encoder.model.config, 64)
    data, _ = open_task(name, directory, options, encoder)
    perfect = {}
    for split, one in data.splits.items():
        examples = one.examples
        labels = np.zeros(len(examples.lengths), int) if split.startswith("test") else examples.labels
        perfect[split] = np.eye(9)[labels][:, : len(data.labels)] if glue.GLUE[name].labels else labels[:, None]
    total = score(data, lambda split: data.metrics(split, perfect[split]))
    assert total == pytest.approx(1.0) and score(data, data.baseline) < 0.9
    for index in range(len(glue.GLUE[name].labels)):
        constant = {split: np.zeros_like(perfect[split]) + np.eye(9)[index, : len(data.labels)] for split in perfect}
        one = score(data, lambda split, constant=constant: data.metrics(split, constant[split]))
        assert one <= score(data, data.baseline)
    (tmp_path / "out").mkdir()
    data.write_predictions(tmp_path / "out", {split: logits.astype(np.float32) for split, logits in perfect.items()})
    submissions = list((tmp_path / "out").glob("*.tsv"))
    assert len(submissions) == (2 if name == "mnli" else 1)
    assert all(len(file.read_text().splitlines()) == 1 + task_files.COUNTS["test"] for file in submissions)
    assert {file.stem for file in (tmp_path / "out").glob("*.jsonl")} == data.splits.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--task tagging --data tagging --cls-norm layer", "--cls-norm .* the head of --task tagging does not read"),
        ("--task tagging --data tagging --pooling mean", "--pooling is .* the head of --task tagging does not read"),
        ("--task rte --pooling mean --cls-norm batch", "--cls-norm normalises .* --pooling mean does not read"),
        ("--task sst", "--task sst is unknown: use one of cola, .* did you mean 'sst2'?"),
        ("--task sst2 --data nowhere", "--data .*nowhere is not a directory"),
        ("--task rte", "train.tsv has no column 'sentence1': it has sentence, label"),
        ("--task mrpc --data empty", "train.tsv does not exist: --task mrpc reads the files of GLUE's MRPC"),
        ("--task classification", "has no column 'text': it has sentence, label: name them with --text-columns and"),
        ("--task classification --data keys", "train.jsonl:1 has no key 'text': .*: name them with --text-columns and"),
        ("--task classification --data empty", "has no train split: it needs a file train with ending .tsv, .csv"),
        ("--task classification --text-columns sentence --data constant", "all examples of dev have the same label"),
        ("--task tagging --data untagged", "all examples of dev have the same label"),
        ("--task classification --data tfds", "tfds has a dataset_info.json, but TFDS cannot read .*prepare it again"),
        (
            "--task sst2 --text-columns sentence",
            "--text-columns is for --task classification, multilabel, regression, multiple_choice, tagging; the files",
        ),
        ("--task sst2 --test-score required", "--test-score required: sst2 has no test split with labels: add one"),
        ("--task sst2 --selection-share 0.001", "--selection-share 0.001 holds out 0 of 64 training examples: choose"),
        ("--task sst2 --selection-share 1", r"--selection-share is 1.*: it must be a number in \(0, 1\)"),
        (
            "--task sst2 --selection-share 0.99",
            "--selection-share 0.99 with seed 0 leaves no example of '[01]' for train",
        ),
        ("--task sst2 --selection-share 0.1 --keep 2", "--keep 2: with --selection-share a run keeps its best epoch"),
        ("--task stsb --data stsb --label-smoothing 0.1", "--label-smoothing is for tasks with one class per example"),
        ("--task sst2 --class-weights 0=1", "--class-weights 0=1: it must have one weight for each of 0, 1, or be"),
        ("--task multilabel --data multilabel --class-weights balanced", "--class-weights is for tasks with one class"),
        ("--task sst2 --skip-damaged", "--skip-damaged is for --task squad; the files of sst2 do not need it: leave"),
        ("--task squad", "has no train split: it needs a file train with ending .json"),
        ("--task tagging --tag-column 7 --data tagging", "there is no column 7 of tags"),
        ("--task sst2 --max-length 65", "--max-length 65 is longer than the model's 64 positions"),
        ("--task sst2 --steps 3 --epochs 2", "--steps and --epochs exclude each other"),
        ("--task sst2 --new-layers 2", "--new-layers 2: the source has 1 layer"),
        ("--task sst2 --keep-head", "--keep-head: .* has no head of a task"),
        ("--task sst2 --freeze-encoder --new-layers 1", "--freeze-encoder and --new-layers exclude each other"),
    ],
)
def test_bad_inputs(arguments, message, folder, tiny_run, tmp_path, capsys, monkeypatch):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for name, train, dev in (
        ("constant", "sentence\tlabel\nx\ta\ny\tb\n", "sentence\tlabel\nx\tb\n"),
        ("untagged", "x\tO\ny\tB-a\n", "x\tO\ny\tO\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.tsv").write_text(train)
        (tmp_path / name / "dev.tsv").write_text(dev)
    task_files.write_multilabel(tmp_path / "multilabel")
    task_files.write_glue(tmp_path / "stsb", "stsb")
    (tmp_path / "empty").mkdir()
    (tmp_path / "tfds").mkdir()
    (tmp_path / "tfds/dataset_info.json").write_text("{")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/train.jsonl").write_text('{"review": "a", "label": 1}\n')
    (tmp_path / "keys/dev.jsonl").write_text('{"review": "a", "label": 1}\n')
    monkeypatch.chdir(tmp_path)
    words = ["finetune", str(tiny_run), "--workdir", "run", *arguments.split()]
    words += [] if "--data" in arguments else ["--data", "sst2"]
    assert cli.main(words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message.replace("?", r"\?"), error), error
    assert not (tmp_path / "run").exists()
