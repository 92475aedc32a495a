"""The compression job: a student of a fine-tuned model, continued after a kill, exported alone, refused in one line."""

import dataclasses
import json

import numpy as np
import pytest

from bert_jax.cli import main as cli
from bert_jax.compress.compress import compress
from bert_jax.compress.compression_options import CompressOptions
from bert_jax.convert.conversion import convert
from bert_jax.convert.formats import input_formats
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.model.heads import Heads
from bert_jax.training.param_paths import name_leaves
from tests.interventions.models import SST2_HEADS, four_heads, write_native
from tests.runs import Killed, committed, kill_after, numbers, read_results, share_programs

pytestmark = pytest.mark.usefixtures("quick_compilation")
OPTIONS = FinetuneOptions(steps=40, batch_size=16, learning_rate=5e-3, dropout=0.0)
STUDENT_OPTIONS = dataclasses.replace(OPTIONS, steps=80)  # after 40 steps the score still depends on the seed
COMPRESSION = CompressOptions(recipe="tinybert", student_layers=1)


@pytest.fixture(scope="module")
def programs():
    """The programs of `compressed`."""
    return share_programs()


@pytest.fixture(scope="module")
def compressed(task_folder, sst2_run, tmp_path_factory, programs):
    """The work directory of a finished student, which is as deep as its teacher and begins at random. Read only."""
    directory = tmp_path_factory.mktemp("compressed") / "student"
    student = dataclasses.replace(COMPRESSION, start="new", hidden_size=32, intermediate_size=48)
    compress(sst2_run, "sst2", task_folder / "sst2", directory, student, STUDENT_OPTIONS, make_programs=programs())
    return directory


@pytest.mark.slow
def test_results(compressed, tmp_path):
    """A new, narrower student learns the task from the teacher's distribution alone: labels have no weight. The export
    has the student only."""
    results = json.loads((compressed / "results.json").read_text())
    assert results["mean"] > 0.9 > results["baseline"] and results["teacher"]["score"] > 0.9
    assert results["share_of_teacher"] == results["mean"] / results["teacher"]["score"]
    student, teacher = results["student"]["parameters"], results["teacher"]["parameters"]
    assert student < 0.6 * teacher and results["student"]["layers_of_teacher"] == []
    metrics = numbers(compressed, "train")
    assert {"soft_loss", "task_loss", "hidden_0_0_mse", "scores_0_0_mse"} <= metrics[-1].keys()
    assert metrics[-1]["soft_loss"] < 0.7 * metrics[0]["soft_loss"]
    convert(compressed, tmp_path / "exported", "huggingface")
    with input_formats.open_model(tmp_path / "exported") as opened:
        assert opened.model.config.hidden_size == 32 and opened.model.heads.task.labels == ("0", "1")
        leaves = name_leaves(opened.model.params)
    assert not any("teacher" in name or "projection" in name for name in leaves)
    assert sum(leaf.size for leaf in leaves.values()) == student


@pytest.mark.slow
def test_killed_and_continued(compressed, task_folder, sst2_run, tmp_path, programs):
    """The same result, metrics and predictions; afterwards other settings need another directory."""
    student = dataclasses.replace(COMPRESSION, start="new", hidden_size=32, intermediate_size=48)
    arguments = sst2_run, "sst2", task_folder / "sst2", tmp_path / "run"
    with pytest.raises(Killed):
        compress(*arguments, student, STUDENT_OPTIONS, make_programs=programs(after_step=kill_after(27)))
    assert 0 < committed(tmp_path / "run")[0] < 27 and not (tmp_path / "run/results.json").exists()
    compress(*arguments, student, STUDENT_OPTIONS, make_programs=programs())
    assert numbers(tmp_path / "run") == numbers(compressed) != []
    assert read_results(tmp_path / "run") == read_results(compressed)
    for name in ("predictions/dev.jsonl", "predictions/SST-2.tsv"):
        assert (tmp_path / "run" / name).read_bytes() == (compressed / name).read_bytes()
    other = dataclasses.replace(student, temperature=2.0)
    with pytest.raises(Exception, match=r"holds a different run .*--temperature"):
        compress(*arguments, other, STUDENT_OPTIONS)


@pytest.mark.slow
def test_a_given_student(compressed, task_folder, sst2_run, tmp_path, tiny_run):
    """It begins with its parameters and head, or with a new head where its own is another one."""
    options = dataclasses.replace(OPTIONS, steps=1, learning_rate=0.0)
    predictions = CompressOptions(recipe="drop", soft_weight=1.0, task_weight=0.0, student=str(compressed))
    result = compress(sst2_run, "sst2", task_folder / "sst2", tmp_path / "second", predictions, options)
    before = json.loads((compressed / "results.json").read_text())
    assert result.to_dict()["mean"] == before["mean"] and result.plan.model.hidden_size == 32
    pretrained = dataclasses.replace(predictions, student=str(tiny_run))
    result = compress(sst2_run, "sst2", task_folder / "sst2", tmp_path / "third", pretrained, options)
    assert result.student_parameters == result.teacher_parameters
    with input_formats.open_model(tmp_path / "third") as after, input_formats.open_model(tiny_run) as source:
        leaves, known = name_leaves(after.model.params), name_leaves(source.model.params)
    encoder = [name for name in leaves if name.startswith("encoder/")]
    assert len(encoder) > 10 and all(np.array_equal(leaves[name], known[name]) for name in encoder)


@pytest.mark.slow
def test_a_copy_of_the_teacher_has_its_score(task_folder, sst2_run, tmp_path):
    """All layers and a learning rate of 0: the share is 1, and the predictions are the teacher's."""
    options = dataclasses.replace(OPTIONS, steps=1, learning_rate=0.0, seeds=2)
    copy = CompressOptions(layers=(0,), recipe="drop")
    result = compress(sst2_run, "sst2", task_folder / "sst2", tmp_path / "run", copy, options)
    values = result.to_dict()
    assert values["share_of_teacher"] == 1.0 and values["standard_deviation"] == 0.0
    assert values["teacher"]["parameters"] == values["student"]["parameters"]
    assert any("share of the teacher's score 100.0%" in line for line in result.summary_lines())
    with input_formats.open_model(tmp_path / "run/seed1") as after, input_formats.open_model(sst2_run) as before:
        leaves = name_leaves(before.model.params)
        assert all(np.array_equal(leaf, leaves[name]) for name, leaf in name_leaves(after.model.params).items())


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--task tagging --data tagging --recipe drop", "give a teacher that was fine-tuned on this task"),
        ("--task sst2 --data sst2 --student-layers 3", "--student-layers 3: the teacher has 2 layers: use at most 2"),
        ("--task sst2 --data sst2 --student-layers 1 --adapter-size 4", "--adapter-size: a student has the form"),
        ("--task sst2 --data nowhere --layers 0 --recipe drop", "is not a directory"),
        ("--task sst2 --data sst2", "has no head of a task: the teacher must be fine-tuned on the task first"),
    ],
)
def test_refused_in_one_line(words, part, task_folder, tmp_path, monkeypatch, capsys):
    teacher = write_native(four_heads(2, Heads() if "no head" in part else SST2_HEADS), tmp_path / "teacher")
    monkeypatch.chdir(task_folder)
    assert cli.main(["compress", "distil", str(teacher), "--workdir", str(tmp_path / "new"), *words.split()]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert part in line and not (tmp_path / "new").exists()
