"""Models stored in 8-bit integers: size, exactness, every reader, and refusals in one line."""

import dataclasses
import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from etils import epath

import bert_jax
from bert_jax.cli import main as cli
from bert_jax.compress.quantise import quantise_model
from bert_jax.convert.conversion import convert
from bert_jax.convert.formats import input_formats, native
from bert_jax.errors import UserError
from bert_jax.finetune import finetune
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.model import bert, int8
from bert_jax.training.param_paths import name_leaves
from tests.finetune import task_files

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
OPTIONS = FinetuneOptions(steps=40, batch_size=16, learning_rate=5e-3, dropout=0.0)
QKV = "encoder/layers/qkv/kernel"


@pytest.fixture(scope="module")
def data(task_folder):
    return task_folder / "sst2"


@pytest.fixture(scope="module")
def tuned(sst2_run):
    return epath.Path(sst2_run)


@pytest.fixture(scope="module")
def quantised(tuned, data, tmp_path_factory):
    """The result of quantising it, and the directory of the model. Read only."""
    directory = epath.Path(tmp_path_factory.mktemp("quantised") / "int8")
    return quantise_model(tuned, directory, task="sst2", data=data), directory


def test_sizes_and_scores(quantised, tuned):
    result, directory = quantised
    before = json.loads((tuned / "results.json").read_text())["mean"]
    assert result.scores[0] == before > 0.9 and abs(result.scores[1] - before) < 0.05
    # The rows of this model are 32 wide: their scales are an eighth of the integers.
    assert result.int8_bytes == (directory / native.PARAMS).stat().length < 0.4 * result.float32_bytes
    assert 1e-5 < result.largest_difference < 0.2 * result.root_mean_square
    assert result.output == "logits of the task head" and result.texts == task_files.COUNTS["dev"]
    values = result.to_dict()
    assert values["scores"] == {"source": before, "int8": result.scores[1]} and json.dumps(values)


def test_what_is_stored_and_read(quantised, tuned):
    """Integers of the kernels and tables, from which the scheme makes the same again; the rest is unchanged."""
    stored = safetensors.numpy.load_file(quantised[1] / native.PARAMS)
    with input_formats.open_model(tuned) as source, input_formats.open_model(quantised[1]) as opened:
        before, after = (name_leaves(one.model.params) for one in (source, opened))
        config, heads = opened.model.config, opened.model.heads
        assert config == dataclasses.replace(source.model.config, dense_dtype="int8")
    axes = bert.int8_axes(config, heads)
    assert {name for name, array in stored.items() if array.dtype == np.int8} == axes.keys()
    for name, along in axes.items():
        integers, scale = int8.quantise(jnp.asarray(after[name]), along)
        np.testing.assert_array_equal(integers, stored[name])
        np.testing.assert_array_equal(scale, stored[name + native.SCALE])
        assert 0 < np.abs(after[name] - before[name]).max() <= 0.5001 * scale.max()
    for name in after.keys() - axes.keys():
        np.testing.assert_array_equal(after[name], before[name])
    assert stored[QKV + native.SCALE].shape == (1, 1, 3, *after[QKV].shape[3:])  # per layer and output channel


def test_every_command_reads_it(quantised, data, tmp_path, capsys):
    model = bert_jax.load(quantised[1])
    assert model.encode(["a text"]).shape == (1, model.config.hidden_size)
    options = dataclasses.replace(OPTIONS, steps=1, learning_rate=0.0, keep_head=True)
    tuned_on = finetune.finetune(quantised[1], "sst2", data, tmp_path / "run", options)
    assert tuned_on.seeds[0].score == quantised[0].scores[1]
    assert bert_jax.load(tmp_path / "run").config.dense_dtype == "int8"
    convert(quantised[1], tmp_path / "copy", "bert-jax")
    assert (tmp_path / "copy" / native.PARAMS).read_bytes() == (quantised[1] / native.PARAMS).read_bytes()
    convert(quantised[1], tmp_path / "huggingface", "huggingface")
    with input_formats.open_model(tmp_path / "huggingface") as source, input_formats.open_model(quantised[1]) as opened:
        other, own = (name_leaves(one.model.params) for one in (source, opened))
        assert all((np.asarray(other[name]) == own[name]).all() for name in other)
    assert "rounded to 8-bit integers" in (tmp_path / "huggingface/README.md").read_text()


def test_a_model_trained_in_int8_does_not_change(tuned, data, tmp_path):
    """Its forward pass rounds already, so quantising it changes no logit; a conversion keeps its float parameters."""
    options = dataclasses.replace(OPTIONS, steps=2, keep_head=True, dense_dtype="int8")
    finetune.finetune(tuned, "sst2", data, tmp_path / "run", options)
    convert(tmp_path / "run", tmp_path / "float", "bert-jax")
    stored = safetensors.numpy.load_file(tmp_path / "float" / native.PARAMS)
    assert all(array.dtype == np.float32 for array in stored.values())
    for name in ("run", "float"):
        result = quantise_model(epath.Path(tmp_path / name), epath.Path(tmp_path / f"{name}-int8"))
        assert result.largest_difference == 0.0 and result.scores is None
        assert result.output == "logits of the task head" and result.texts > 20


def test_models_without_a_head_of_a_task(tiny_export, tmp_path, capsys):
    """The command, with the logits of the MLM head."""
    command = ["compress", "quantise", str(tiny_export), "--out", str(tmp_path / "int8"), "--json"]
    assert cli.main(command) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["output"] == "logits of the MLM head" and values["scores"] is None
    assert 0 < values["largest_difference"] < 0.3 * values["root_mean_square"]
    assert cli.main(["fill-mask", str(tmp_path / "int8"), "a [MASK]"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{int8} --out new", "int8 is in 8-bit integers already: there is nothing to quantise"),
        ("{run} --out there", "--out .*there exists already: choose another destination"),
        ("{run} --out new --task sst2", "--task is given alone: give --task and --data, or neither"),
        ("{run} --out new --data sst2", "--data is given alone"),
        ("{run} --out new --task rte --data rte", "has the labels 0, 1 .*, the task has .*entailment"),
        ("{source} --out new --task sst2 --data sst2", "has no head of a task: fine-tune it first"),
        ("{run} --out new --task sst2 --data sst2 --max-length 4", "--max-length is 4: it must be"),
        ("nowhere --out new", "nowhere does not exist"),
    ],
)
def test_bad_inputs(arguments, message, quantised, tuned, tiny_run, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(data, "sst2")
    task_files.write_glue(tmp_path / "rte", "rte")
    (tmp_path / "there").mkdir()
    words = arguments.format(int8=quantised[1], run=tuned, source=tiny_run).split()
    assert cli.main(["compress", "quantise", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, error), error
    assert {path.name for path in tmp_path.iterdir()} == {"sst2", "rte", "there"}


def test_an_interrupted_command_writes_nothing(tuned, tmp_path):
    """Ctrl-C while the model is written, and another process that creates the directory first."""

    def interrupt(line):
        if line.startswith("writing"):
            raise KeyboardInterrupt

    out = epath.Path(tmp_path / "new")
    with pytest.raises(KeyboardInterrupt):
        quantise_model(tuned, out, announce=interrupt)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="new exists already: choose another"):
        quantise_model(tuned, out, announce=lambda line: out.mkdir() if line.startswith("writing") else None)
    assert list(tmp_path.rglob("*")) == [tmp_path / "new"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(QKV + native.SCALE), rf"needs {QKV} of shape .*, float32, which .* has with .* int8"),
        (lambda t: t.update({QKV: t[QKV].astype(np.float32)}), rf"needs {QKV} of shape .*, int8, which .* float32"),
        (lambda t: t.update({QKV + native.SCALE: np.ones(3, np.float32)}), r"\.scale of shape \[1, 1, 3, .* \[3\]"),
        (lambda t: t[QKV + native.SCALE].fill(np.inf), f"{QKV}' has the value inf"),
        (lambda t: t.update({"mlm/bias.scale": t.pop(QKV + native.SCALE)}), "needs .*, which .* has with"),
    ],
)
def test_damaged_files(change, message, quantised, tmp_path):
    """With a matching digest, as from a wrong writer."""
    model = epath.Path(shutil.copytree(quantised[1], tmp_path / "model"))
    tensors = safetensors.numpy.load_file(model / native.PARAMS)
    change(tensors)
    safetensors.numpy.save_file(tensors, model / native.PARAMS)
    about = json.loads((model / native.DESCRIPTION).read_text())
    about["sha256"][native.PARAMS] = native._digest(model / native.PARAMS)
    (model / native.DESCRIPTION).write_text(json.dumps(about))
    with pytest.raises(UserError, match=message):
        bert_jax.load(model)
