"""bert-jax bench --serve: all runtimes get the same ids and give the same outputs; report, figure and mistakes."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bert_jax.bench import bench, serve, serve_figure, serve_quality
from bert_jax.bench.serve_models import ServedModel, open_models
from bert_jax.config import ModelConfig
from bert_jax.config.finetuning import TaskHead
from bert_jax.convert.conversion import OUTPUT_FORMATS, convert
from bert_jax.convert.forward_types import ForwardInputs
from bert_jax.convert.parity import transformers_forward
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel
from bert_jax.errors import UserError
from bert_jax.finetune.encoding import EncodedExamples
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.storage.paths import to_path
from bert_jax.training.param_paths import map_with_paths
from tests.building import make_tokenizer
from tests.finetune import task_files

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
FORMATS = ["onnx", "onnx-int8", "openvino", "openvino-int8", "stablehlo"]
PACKAGE = {"onnx": "onnxruntime", "openvino": "openvino", "stablehlo": "flatbuffers"}
FORMATS = [name for name in FORMATS if importlib.util.find_spec(PACKAGE[name.partition("-")[0]])]


def source_model(directory: Path, heads: Heads) -> SourceModel:
    """A random model, with a tokenizer in the directory."""
    tokenizer = make_tokenizer()
    tokenizer.save(directory / "tokenizer.json")
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48, "max_positions": 64}
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **shape)
    rng = np.random.default_rng(0)

    def draw(path: str, leaf) -> np.ndarray:
        middle = 1.0 if path.endswith("scale") else 0.0
        return (middle + 0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)

    model = NativeModel("bert", config, heads, map_with_paths(draw, bert.shapes(config, heads)))
    return SourceModel("run", str(directory), model, to_path(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A classifier of SST-2 as `ours` and in every format; a pretrained model as `encoder`, `encoder-onnx`, ..."""
    directory = tmp_path_factory.mktemp("served")
    classifier = Heads(mlm=False, task=TaskHead("classification", ("0", "1"), "pooled"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_forward, "available", lambda: False)
        for prefix, heads, formats in (
            ("", classifier, FORMATS),
            ("encoder-", Heads(mlm=True, pair=True), [name for name in FORMATS if name != "stablehlo"]),
        ):
            source = source_model(directory, heads)
            for name in ("bert-jax", *formats):
                own = {"": "ours", "encoder-": "encoder"}[prefix]
                assert convert(source, directory / (own if name == "bert-jax" else prefix + name), name).passed
    task_files.write_glue(directory / "sst2", "sst2")
    return directory


def test_all_runtimes_give_the_same_logits(models):
    opened = open_models([to_path(models / name) for name in ("ours", *FORMATS)], 2)
    ids = np.random.default_rng(0).integers(5, 60, (3, 9)).astype(np.int32)
    mask = (np.arange(9)[None] < np.array([[9], [5], [2]])).astype(np.int32)
    inputs = ForwardInputs(ids, np.zeros_like(ids), mask)
    first = opened[0].call(inputs)
    assert first.shape == (3, 2) and np.ptp(first) > 0.01
    for one, name in zip(opened[1:], FORMATS, strict=True):
        limit = 0.2 if "int8" in name else 1e-4
        outputs = one.call(inputs)
        assert outputs.shape == (3, 2) and 0 < np.abs(outputs - first).max() < limit, name
        assert one.head == ("texts" if name == "stablehlo" else "classification")  # a program does not say what of
        assert one.vocab_size == opened[0].vocab_size
        assert one.max_positions == opened[0].max_positions
    sizes = {name: one.megabytes for name, one in zip(FORMATS, opened[1:], strict=True)}
    for name in sizes:
        assert 0.02 < sizes[name] < 0.5 and ("int8" not in name or sizes[name] < sizes[name.removesuffix("-int8")])


def test_encoders_without_a_head_give_hidden_states(models):
    """Of the outputs of a file, one is computed: the int8 file of OpenVINO keeps its groups."""
    names = [name for name in FORMATS if name != "stablehlo"]
    opened = open_models([to_path(models / name) for name in ("encoder", *(f"encoder-{name}" for name in names))], 1)
    batch = serve.random_batch(opened, 2, 16)
    assert batch.input_ids_BS.max() < opened[0].vocab_size and batch.attention_mask_BS.all()
    first = opened[0].call(batch)
    for one, name in zip(opened[1:], names, strict=True):
        outputs = one.call(batch)
        assert outputs.shape == first.shape == (2, 16, 32) and one.head is None
        # ONNX Runtime: 0.63 where 8-bit products saturate (CPUs without VNNI).
        limit = {"onnx-int8": 1.0, "openvino-int8": 0.3}.get(name, 1e-4)
        assert 0 < np.abs(outputs - first).max() < limit < np.abs(first).max(), name


@pytest.mark.skipif("onnx" not in FORMATS, reason="onnxruntime is not installed")
def test_two_models_in_one_directory(models, tmp_path):
    """Files are named; each is the model of its own format, of its own size."""
    convert(models / "encoder", tmp_path / "both", "onnx-both")
    files = [graph.path for graph in OUTPUT_FORMATS["onnx-both"].graphs]
    with pytest.raises(UserError, match=f"both has 2 models: give one of the files {files[0]} and {files[1]} in it"):
        open_models([to_path(tmp_path / "both")], 1)
    alone = open_models([to_path(models / f"encoder-onnx{end}") for end in ("", "-int8")], 1)
    opened = open_models([to_path(tmp_path / "both" / file) for file in files], 1)
    batch = serve.random_batch(alone, 2, 16)
    for one, other, file in zip(opened, alone, files, strict=True):
        np.testing.assert_array_equal(one.call(batch), other.call(batch))
        assert one.megabytes == pytest.approx(other.megabytes, rel=1e-3) and one.name == Path(file).name
        assert one.tokenizer.vocab_size == other.tokenizer.vocab_size


def test_pooling_of_a_graph_without_hidden_states(models, tmp_path):
    """A graph that classifies [CLS] has logits only: nothing to pool, whether the pooling is given or the model's."""
    pytest.importorskip("onnx")
    with pytest.raises(UserError, match=r"--pooling mean: .*ours classifies .CLS., and onnx then has its logits"):
        convert(models / "ours", tmp_path / "out", "onnx", pooling="mean")
    assert not list(tmp_path.iterdir())
    convert(models / "ours", tmp_path / "sentences", "bert-jax", pooling="mean")
    convert(tmp_path / "sentences", tmp_path / "out", "onnx")
    assert (tmp_path / "sentences/modules.json").exists() and not (tmp_path / "out/modules.json").exists()


def test_a_model_that_is_given_twice_has_two_names(models):
    """Rows are found by name."""
    paths = [to_path(f"{models}/{name}") for name in ("ours", "encoder", "ours", "./ours/")]
    names = [one.name for one in open_models(paths, 1)]
    assert names == [f"{models}/ours", "encoder", f"{models}/ours (2)", f"{models}/ours (3)"]


def test_the_whole_command(models, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    names = ["ours", *(name for name in FORMATS if name != "stablehlo")]
    arguments = ["--serve", *(str(models / name) for name in names), "--seq-lens", "8,16", "--rounds", "2"]
    arguments += ["--batch", "2", "--task", "sst2", "--data", str(models / "sst2")]
    file, figure = tmp_path / "report.json", tmp_path / "figure.svg"
    assert bench.main([*arguments, "--json", str(file), "--figure", str(figure)]) == 0
    (printed, err), report = capsys.readouterr(), json.loads(file.read_text())
    assert [row["model"] for row in report["models"]] == names and "throughput, rows 2" in printed
    assert "different outputs" not in err
    for part in ("latency", "throughput"):
        assert [(row["model"], row["tokens"]) for row in report[part]] == [(n, t) for t in (8, 16) for n in names]
    for row in report["throughput"]:
        seconds = sorted(row["samples"])
        assert len(seconds) == 2 and row["tokens/s"] == pytest.approx(row["tokens"] * row["sentences/s"])
        assert row["sentences/s"] == pytest.approx(2 / np.median(seconds))
    assert all(0 < row["ms"] <= row["ms, 95 %"] for row in report["latency"])
    scores = {row["model"]: row["score"] for row in report["quality"]}
    assert all(row["examples"] == task_files.COUNTS["dev"] for row in report["quality"])
    assert scores["onnx"] == scores["ours"] if "onnx" in scores else True
    assert report["environment"]["threads"] >= 1 and report["models"][0]["size / first"] == 1
    drawn = figure.read_text()
    assert "score of sst2 / that of ours" in drawn and "throughput / that of ours" in drawn
    serve_figure.write(tmp_path / "figure.png", report)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_different_outputs_are_noted(models, capsys):
    arguments = ["--serve", str(models / "ours"), str(models / "encoder"), "--seq-lens", "8", "--batch", "1"]
    assert bench.main([*arguments, "--rounds", "1"]) == 0
    assert "note: the models compute different outputs (classification, last hidden state)" in capsys.readouterr().err


def fake(name: str, call, **changes) -> ServedModel:
    values = {"vocab_size": 50, "max_positions": 64, "head": "classification", "labels": ("a", "b"), "megabytes": 2.0}
    return ServedModel(name, "none", call, **values | changes, tokenizer=None)


def test_ratios_are_of_the_first_model(monkeypatch):
    """With a clock that each model advances by its own time."""
    now = [0.0]

    def model(name: str, seconds: float) -> ServedModel:
        def call(inputs: ForwardInputs) -> np.ndarray:
            now[0] += seconds * inputs.input_ids_BS.size
            return np.zeros((1, 1))

        return fake(name, call)

    for clock in ("perf_counter", "process_time", "thread_time"):
        monkeypatch.setattr(serve.time, clock, lambda: now[0])
    monkeypatch.setitem(serve.harness.CLOCKS, "seconds", lambda: now[0])
    models = [model("slow", 0.015), model("quick", 0.005)]
    slow, quick = serve.measure_throughput(models, 10, 4, 3)
    assert slow["speed / first"]["median"] == pytest.approx(1) and quick["speed / first"]["median"] == pytest.approx(3)
    assert quick["sentences/s"] == pytest.approx(20) and quick["tokens/s"] == pytest.approx(200)
    slow, quick = serve.latency_rows(models, 10, 3)
    assert (slow["calls"], quick["calls"]) == (6, 18)
    assert slow["ms"] == pytest.approx(150) and quick["ms, 95 %"] == pytest.approx(50)
    assert quick["time / first"]["median"] == pytest.approx(1 / 3)


def test_logits_come_back_in_the_order_of_the_examples():
    """Batches are sorted by length and padded; the logits are those of each example alone."""
    lengths = np.random.default_rng(0).integers(3, 40, 70)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(starts[-1]).astype(np.int32)
    examples = EncodedExamples(ids, ids % 2, starts, np.zeros(len(lengths), np.int32), 0)
    shapes = set()

    def call(inputs: ForwardInputs) -> np.ndarray:
        shapes.add(inputs.input_ids_BS.shape)
        real = inputs.attention_mask_BS
        assert (inputs.input_ids_BS[real == 0] == -7).all()
        return np.stack([(inputs.input_ids_BS * real).sum(1), (inputs.token_type_ids_BS * real).sum(1)], 1)

    logits = serve_quality.task_logits(fake("sums", call), examples, -7, by_token=False)
    for index in range(len(lengths)):
        part = ids[starts[index] : starts[index + 1]]
        assert logits[index].tolist() == [part.sum(), (part % 2).sum()]
    assert shapes == {(32, 32), (32, 48)}

    tagged = fake("tokens", lambda inputs: inputs.input_ids_BS[..., None], head="tagging")
    assert (serve_quality.task_logits(tagged, examples, -7, by_token=True)[:, 0] == ids).all()


def test_mistakes_end_before_anything_is_measured(models, tmp_path, capsys):
    """One line, exit code 2, no file."""
    ours, encoder, data = models / "ours", models / "encoder", models / "sst2"
    (tmp_path / "empty").mkdir()
    (tmp_path / "old.svg").write_text("old")
    shutil.copytree(ours, tmp_path / "other")
    settings = json.loads((tmp_path / "other/model.json").read_text())
    settings["heads"]["task"]["labels"] = ["no", "yes"]
    (tmp_path / "other/model.json").write_text(json.dumps(settings))
    cases = {
        f"{tmp_path}/empty": "is no model to serve: it has neither onnx/model.onnx",
        f"{tmp_path}/none": "none does not exist",
        f"{ours} --seq-lens 8,65": "--seq-lens 65: ours has 64 positions: give shorter rows",
        f"{ours} --batch 1000000000": "--batch 1000000000: rows of 64 tokens: give at most 16,384",
        f"{ours} --task sst2": "--task and --data belong together",
        f"{ours} --task nothing --data {data}": "nothing",
        f"{ours} --task sst2 --data {tmp_path}/none": "is not a directory",
        f"{encoder} --task sst2 --data {data}": "encoder has no head for --task sst2",
        f"{tmp_path}/other --task sst2 --data {data}": "with the labels no, yes, --task sst2 has 0, 1",
        f"{ours} --figure {tmp_path}/old.svg": "exists: choose another name",
        f"{ours} --figure {tmp_path}/new.pdf": "must end in .svg or .png",
        f"{ours} --figure {tmp_path}/none/new.svg": "there is no directory",
    }
    if "onnx" in FORMATS:
        cases[f"{models}/onnx --task sst2 --data {data}"] = "the first MODEL is the reference"
    before = sorted(tmp_path.rglob("*"))
    for arguments, words in cases.items():
        assert bench.main(["--serve", *arguments.split(), "--json", str(tmp_path / "new.json")]) == 2
        message = capsys.readouterr().err
        assert words in message and message.count("error: ") == 1 and message.splitlines()[-1].startswith("error: ")
    assert sorted(tmp_path.rglob("*")) == before
    for arguments, words in (
        ("", "expected at least one"),
        (f"{ours} --presets bert_tiny", "unrecognized"),
        ("x --rounds 0", "from 1"),
    ):
        with pytest.raises(SystemExit):
            bench.main(["--serve", *arguments.split()])
        assert words in capsys.readouterr().err


def test_another_tokenizer_is_refused():
    one = fake("second", None)._replace(tokenizer=make_tokenizer())
    serve_quality.check_tokenizer(one, make_tokenizer(), "first")
    with pytest.raises(UserError, match="second has another tokenizer than first"):
        serve_quality.check_tokenizer(one, make_tokenizer("é"), "first")


@pytest.mark.parametrize(("name", "package"), [("onnx", "onnxruntime"), ("openvino", "openvino")])
def test_a_missing_runtime(name, package, tmp_path, monkeypatch, capsys):
    file = tmp_path / name / (f"{name}_model.xml" if name == "openvino" else "model.onnx")
    file.parent.mkdir()
    file.write_text("")
    (tmp_path / "config.json").write_text("{}")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda word, *rest: None if word == package else find_spec(word))
    assert bench.main(["--serve", str(tmp_path)]) == 2
    assert f"needs the package {package}: pip install" in capsys.readouterr().err


def test_a_figure_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UserError, match="--figure needs the package matplotlib"):
        serve_figure.check_file(tmp_path / "new.svg")
