"""`bert-jax compress pretrain`: a student pretrained with a teacher, continued, exported alone, refused in one line."""

import dataclasses
import shlex
import shutil

import numpy as np
import pytest

from bert_jax.cli import main as cli
from bert_jax.compress import corpus_distillation
from bert_jax.compress.compression_options import CompressOptions
from bert_jax.compress.corpus_distillation import distil_on_corpus
from bert_jax.convert.formats import input_formats
from bert_jax.data.mixture import CorpusWeight
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.training import pretraining
from bert_jax.training.param_paths import name_leaves
from bert_jax.training.run_directory import checkpoint, workdir
from tests.runs import Killed, committed, kill_after, numbers, share_programs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
OPTIONS = CompressOptions(recipe="tinybert", start="new", hidden_size=32, intermediate_size=48)


@pytest.fixture(scope="module")
def programs():
    """The programs of one recipe."""
    return share_programs()


@pytest.fixture(scope="module")
def config(tiny_config):
    """Two phases of four steps."""
    phase = dataclasses.replace(tiny_config.phases[0], steps=4, warmup_steps=1)
    return dataclasses.replace(
        tiny_config, phases=(phase, dataclasses.replace(phase, moments="reset", step_count="reset"))
    )


@pytest.fixture(scope="module")
def distilled(config, tiny_run, tiny_corpus, tmp_path_factory, programs):
    """The work directory of a finished student, narrower than its teacher. Read only."""
    directory = tmp_path_factory.mktemp("distilled") / "student"
    arguments = config, [CorpusWeight(tiny_corpus)], tiny_run, directory, OPTIONS
    progress = distil_on_corpus(*arguments, make_programs=programs())
    assert progress.ended and progress.evaluation["mlm_loss"] > 1
    return directory


def test_the_run(distilled, tiny_run):
    """Its config has the student and what repeats it; its checkpoint the teacher, unchanged, and the map."""
    config = workdir.read_config(distilled)
    assert (config.model.hidden_size, config.model.num_layers, config.model.vocab_size) == (32, 1, 120)
    assert (
        config.distil.flags == (*("--recipe tinybert", "--start new", "--hidden-size 32", "--intermediate-size 48"),)
        and len(config.distil.source_sha256) == 64
    )
    metrics = numbers(distilled, "train")
    assert {"soft_loss", "mlm_loss", "hidden_1_1_mse", "scores_0_0_mse", "weighted_soft_loss"} <= metrics[-1].keys()
    assert metrics[-1]["hidden_1_1_mse"] < metrics[0]["hidden_1_1_mse"]
    newest = checkpoint.newest_intact(checkpoint.checkpoint_directory(distilled))
    model = dataclasses.replace(config.model, hidden_size=64, intermediate_size=96)
    shapes = bert.shapes(model, Heads(mlm=True))
    restored = name_leaves(checkpoint.restore_parts(newest, {"params": {"teacher": shapes}})["params"]["teacher"])
    with input_formats.open_model(tiny_run) as opened:
        teacher = name_leaves(opened.model.params)
    assert len(restored) > 20 and all(np.array_equal(leaf, teacher[name]) for name, leaf in restored.items())


def test_the_export_is_the_student_alone(distilled, tiny_corpus, tmp_path, capsys):
    assert cli.main(["convert", str(distilled), str(tmp_path / "exported")]) == 0
    with input_formats.open_model(tmp_path / "exported") as opened:
        assert opened.model.config.hidden_size == 32 and opened.model.heads.mlm
        assert not any("teacher" in name or "projection" in name for name in name_leaves(opened.model.params))
    metrics = pretraining.evaluate(distilled, [CorpusWeight(tiny_corpus)]).metrics
    assert metrics["mlm_loss"] == pytest.approx(numbers(distilled, "validation")[-1]["mlm_loss"], rel=1e-5)


def test_killed_and_continued(distilled, config, tiny_run, tiny_corpus, tmp_path, programs):
    """The same metrics; other settings need another directory."""
    arguments = config, [CorpusWeight(tiny_corpus)], tiny_run, tmp_path / "run"
    with pytest.raises(Killed):
        distil_on_corpus(*arguments, OPTIONS, make_programs=programs(after_step=kill_after(6)))
    assert committed(tmp_path / "run")[0] == 4
    distil_on_corpus(*arguments, OPTIONS, make_programs=programs())
    assert numbers(tmp_path / "run") == numbers(distilled) != []
    with pytest.raises(Exception, match=r"holds a different run .*--temperature"):
        distil_on_corpus(*arguments, dataclasses.replace(OPTIONS, temperature=2.0), make_programs=programs())


def test_the_report_repeats_the_command(distilled, capsys):
    assert cli.main(["report", str(distilled)]) == 0
    shown = capsys.readouterr().out
    assert "compress pretrain" in shown and "--hidden-size 32" in shown and "--model." not in shown


SMALL = "--phases.0.steps 2 --phases.0.seq-len 32 --phases.0.batch-size 8 --phases.0.accumulation 1"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--recipe theseus", "use bert-jax compress distil"),
        ("--model.num-layers 2", "--model.num-layers: a student has the form of its teacher"),
        ("--model.attention xla --model.attention-dropout 0 --recipe tinybert", "does not keep the scores"),
        ("--init-from elsewhere", "a student begins as --start or --student says"),
        ("--phases.0.num-layers 2", "phases.0.num_layers 2: a student is the same model in all phases"),
        ("--mesh.tensor 3 --mesh.data 1", "mesh 1 x 1 x 3"),
        ("--corpus OTHER", "has another tokenizer than the teacher"),
        ("--student OTHER_MODEL --recipe drop", "has another tokenizer than the teacher"),
        ("--student RUN --start new", "--student and --start exclude each other"),
    ],
)
def test_refused_in_one_line(words, part, tiny_run, tiny_corpus, other_corpus, tiny_export, tmp_path, capsys):
    corpus = ["--corpus", str(other_corpus if "OTHER" in words.split() else tiny_corpus)]
    if "OTHER_MODEL" in words:
        shutil.copytree(tiny_export, tmp_path / "model")
        shutil.copy(other_corpus / "tokenizer.json", tmp_path / "model/tokenizer.json")
    words = words.replace("--corpus OTHER", "").replace("OTHER_MODEL", str(tmp_path / "model")).replace("RUN", "run")
    command = ["compress", "pretrain", "bert_tiny", "--teacher", str(tiny_run), *corpus]
    assert cli.main([*command, "--workdir", str(tmp_path / "new"), *SMALL.split(), *shlex.split(words)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert part in line and not (tmp_path / "new").exists(), line


def test_a_teacher_without_mlm_head(tiny_run, tiny_corpus, config, tmp_path):
    """It has no soft targets; its hidden states can be matched."""
    teacher = corpus_distillation.read_source(tiny_run)
    headless = teacher._replace(model=teacher.model._replace(heads=dataclasses.replace(teacher.model.heads, mlm=False)))
    plan = CompressOptions(recipe="distilbert", student_layers=1).plan(teacher.model.config)
    with pytest.raises(Exception, match="has no MLM head, so it has no soft targets: give --soft-weight 0"):
        corpus_distillation.run_config(config, plan, headless, None, CompressOptions())
    plan = plan._replace(recipe=plan.recipe._replace(soft_weight=0.0))
    assert corpus_distillation.run_config(config, plan, headless, None, CompressOptions()).distil is not None
