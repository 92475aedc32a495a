"""Pruning: what is kept, a checkpoint that computes what the masked model computes, mistakes in one line."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import bert_jax
from bert_jax.cli import main as cli
from bert_jax.command.progress import progress_bar
from bert_jax.compress import prune as prune_module
from bert_jax.compress.prune import choose_kept_indices, prune
from bert_jax.compress.prune_options import PruneOptions
from bert_jax.convert.conversion import convert
from bert_jax.errors import UserError
from bert_jax.finetune.finetune import read_source
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.tasks import open_task
from bert_jax.interventions.pruning_masks import ACTIVATIONS, CONTEXT, Examples
from bert_jax.interventions.task_evaluation import task_score
from bert_jax.model.heads import Heads
from bert_jax.storage.paths import to_path
from tests.building import make_documents
from tests.finetune import task_files
from tests.interventions.models import SST2_HEADS, four_heads, write_native

pytestmark = pytest.mark.usefixtures("quick_compilation")
OPTIONS = PruneOptions(task="sst2", iterations=3, examples=8)
NOTHING = Examples("mlm", [], 0, np.zeros(0, np.int64), None)
BAR = progress_bar("test", 1, "iteration", shown=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`model`, `pretrained` without a task head, `sst2` and `texts`. Read only."""
    directory = tmp_path_factory.mktemp("prune")
    write_native(four_heads(2, SST2_HEADS), directory / "model")
    write_native(four_heads(2, Heads()), directory / "pretrained")
    task_files.write_glue(directory / "sst2", "sst2")
    (directory / "texts").mkdir()
    (directory / "texts" / "a.txt").write_text("\n".join(make_documents(0, 30)))
    return directory


@pytest.fixture(scope="module")
def pruned(folder, tmp_path_factory):
    """The result of pruning by the task, and its directory. Read only."""
    out = tmp_path_factory.mktemp("pruned") / "out"
    return prune(to_path(folder / "model"), to_path(folder / "sst2"), to_path(out), OPTIONS), out


def test_importances_are_computed_again(folder, monkeypatch):
    """Heads 0 and 1 do the same: neither matters until the other is gone. Units matter by their number."""
    model, calls = bert_jax.load(folder / "model"), []

    def derivatives(model, examples, masks):
        calls.append({site: mask.sum(1).tolist() for site, mask in masks.items()})
        heads = np.tile([1.0, 1.1, 2.0, 4.0], (1, 2, 1))
        one_is_gone = ~masks[CONTEXT][:, :2].all(1)
        heads[:, one_is_gone, :2] = 9
        return {CONTEXT: heads, ACTIVATIONS: np.tile(np.arange(40.0), (1, 2, 1))}

    monkeypatch.setattr(prune_module, "mask_derivatives", derivatives)
    counts = {CONTEXT: 2, ACTIVATIONS: 10}
    kept = {n: choose_kept_indices(model, NOTHING, counts, n, BAR) for n in (1, 2, 4)}
    assert kept[1][CONTEXT].tolist() == [[2, 3]] * 2
    assert kept[2][CONTEXT].tolist() == kept[4][CONTEXT].tolist() == [[1, 3]] * 2
    assert all(one[ACTIVATIONS].tolist() == [list(range(30, 40))] * 2 for one in kept.values())
    heads, units = [call[CONTEXT][0] for call in calls], [call[ACTIVATIONS][0] for call in calls]
    assert heads == [4, 4, 3, 4, 4, 3, 3] and units == [40, 40, 25, 40, 33, 25, 18]
    calls.clear()
    choose_kept_indices(model, NOTHING, {CONTEXT: 3}, 8, BAR)
    assert len(calls) == 1  # removals of less than a head are skipped


def test_results(folder, pruned):
    """Score before and after on all of dev, sizes, what `write_smaller` compared, and the model card."""
    result, out = pruned
    values = json.loads(json.dumps(result.to_dict()))
    assert values["sizes"] == {"heads": [4, 2], "units": [40, 20]} and values["importance_examples"] == 8
    assert values["examples"] == values["labels"] == 24 and values["kept_heads"] == result.kept[CONTEXT].tolist()
    source = read_source(to_path(folder / "model"))
    data, _ = open_task("sst2", to_path(folder / "sst2"), FinetuneOptions(max_length=64), source)
    for directory, score in ((folder / "model", values["whole"]["score"]), (out, values["pruned"]["score"])):
        assert task_score(bert_jax.load(directory), data) == pytest.approx(score)
    assert result.smaller["largest_logit_difference"] < 1e-5 < 0.01 < result.smaller["largest_logit_change_by_mask"]
    sizes = values["pruned"]["parameters"]
    assert sizes["whole"] - sizes["smaller"] == 2 * (2 * 8 * (3 * 33 + 32) + 20 * (33 + 32))
    lines = "\n".join(result.summary_lines())
    assert "8 examples for importances, 3 iterations" in lines and "times as fast: " in lines
    card = (out / "README.md").read_text()
    assert "2 of 4 heads of every layer were removed" in card and "20 of 40 units" in card


@pytest.mark.slow
def test_texts_and_one_kind_alone(folder, tmp_path, monkeypatch, capsys):
    """By the loss of masked tokens; with all heads, the model is one of transformers."""
    monkeypatch.chdir(folder)
    words = ["compress", "prune", "pretrained", "--data", "texts", "--examples", "6", "--json"]
    words += ["--iterations", "1000000000"]  # as many as units are removed
    assert cli.main([*words, "--heads", "1", "--units", "0.25", "--out", str(tmp_path / "units")]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["sizes"] == {"heads": [4, 4], "units": [40, 10]} and values["objective"] == "mlm"
    assert values["iterations"] == 30
    assert "kept_heads" not in values
    convert(tmp_path / "units", tmp_path / "exported", "huggingface")
    assert bert_jax.load(tmp_path / "exported").config.intermediate_size == 10


def test_heads_of_another_width_stay_in_the_native_format(pruned, tmp_path, capsys):
    assert cli.main(["convert", str(pruned[1]), str(tmp_path / "new")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model.head_size 8 cannot be written as bert" in line and "use --to bert-jax" in line


@pytest.mark.slow
def test_a_pruned_model_is_trained_on(folder, pruned, tmp_path, capsys):
    """It begins with the pruned head and layers; the run is converted to the native format."""
    words = ["--task", "sst2", "--data", str(folder / "sst2"), "--keep-head", "--steps", "1", "--learning-rate", "0"]
    assert cli.main(["finetune", str(pruned[1]), "--workdir", str(tmp_path / "run"), *words]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["seeds"][0]["score"] == pytest.approx(pruned[0].smaller["score"])
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "again"), "--to", "bert-jax"]) == 0
    assert bert_jax.load(tmp_path / "again").config.num_heads == 2


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--heads 0", "--heads 0 leaves none of the 4 of a layer: give at least 0.25"),
        ("--units 0.01", "--units 0.01 leaves none of the 40 of a layer: give at least 0.025"),
        ("--heads 1 --units 1", "--heads 1 and --units 1 remove nothing"),
        ("--heads 0.99 --units 0.99", "remove nothing: a layer has 4 heads and 40 units"),
        ("--heads 1.5", "--heads is 1.5: it must be a number in [0, 1]"),
        ("--iterations 0", "--iterations is 0"),
        ("--task sst", "--task sst is unknown"),
        ("--task cola", "CoLA"),
        ("--data nowhere", "--data nowhere is not a directory"),
        ("--data sst2", "--data sst2 has no .txt files"),
        ("--max-length 65 --task sst2 --data sst2", "--max-length 65 is longer than the model's 64 positions"),
        ("--out sst2", "--out sst2 exists already"),
        ("--out texts/a.txt/new", "--out texts/a.txt/new: cannot write to texts/a.txt (not a directory)"),
    ],
)
def test_refused_in_one_line(words, part, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    given = words.split()
    for name, value in (("--data", "texts"), ("--out", str(tmp_path / "new"))):
        if name not in given:
            given += [name, value]
    before = sorted(folder.rglob("*"))
    assert cli.main(["compress", "prune", "model", *given]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert part in line, line
    assert not (tmp_path / "new").exists() and sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("heads", "changes", "task", "message"),
    [
        (Heads(), {}, "sst2", "has no head of a task: fine-tune it first"),
        (dataclasses.replace(SST2_HEADS, mlm=False), {}, "", "has no MLM head: give the task"),
        (Heads(), {"direction": "causal"}, "", "is a causal model"),
        (Heads(), {"dense_dtype": "int8"}, "", "is in 8-bit integers"),
        (Heads(), {"feed_forward_networks": 2}, "", "several feed-forward networks in a layer"),
    ],
)
def test_models_that_cannot_be_pruned(folder, heads, changes, task, message, tmp_path):
    model = write_native(four_heads(2, heads, **changes), tmp_path / "model")
    data = folder / ("sst2" if task else "texts")
    with pytest.raises(UserError, match=message):
        prune(to_path(model), to_path(data), to_path(tmp_path / "out"), PruneOptions(task=task))
    shutil.rmtree(model)
    assert not [*tmp_path.iterdir()]
