"""ONNX and OpenVINO files: every family and head in their runtimes, int8 beside its definition, and `convert`."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from bert_jax.config import ModelConfig
from bert_jax.config.finetuning import TaskHead
from bert_jax.convert.conversion import OUTPUT_FORMATS, convert
from bert_jax.convert.formats import input_formats, onnx_files, openvino_files
from bert_jax.convert.forward_types import ForwardInputs
from bert_jax.convert.parity import jax_forward, numpy_forward, parity_report
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel, from_huggingface, to_huggingface
from bert_jax.errors import UserError, install_command
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.training.param_paths import map_with_paths
from tests.convert.test_numpy_forward import GOLDENS, golden_model
from tests.golden import make_families

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from bert_jax.convert.formats import onnx_graph, onnx_model  # noqa: E402 (need the package)

pytestmark = pytest.mark.usefixtures("only_numpy", "quick_compilation")

CASES = [case for case in GOLDENS if case.endswith(" 0") and not case.startswith("MobileBert")]
CASES += [f"{family}ForMaskedLM 1" for family in ("Bert", "Roberta", "DistilBert")]
SMALL = {"vocab_size": 60, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
MODERN = {"norm_placement": "pre", "positions": "rotary", "rotary_base": 90.0, "local_rotary_base": 20.0}
MODERN |= {"attention_window": 2, "global_every": 2, "type_vocab_size": 0}
MODERN |= {"feed_forward": "gated", "biases": "none", "num_layers": 4}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def needs_openvino() -> None:
    """Skip without openvino; importing it here would switch its telemetry on."""
    if importlib.util.find_spec("openvino") is None:
        pytest.skip("openvino is not installed")


def in_onnxruntime(model: NativeModel, inputs: ForwardInputs, graph: type = onnx_graph.FloatGraphBuilder):
    """Outputs of a graph by their names in the parity report."""
    proto = onnx_model.build(model, graph)
    onnx.checker.check_model(proto, full_check=True)
    options = onnxruntime.SessionOptions()
    # At higher levels, ONNX Runtime rounds the inputs of products with weights in 8 bits, too.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, onnx_files.feeds([x.name for x in session.get_inputs()], inputs))
    names = [x.name for x in session.get_outputs()]
    for port, value in zip(session.get_outputs(), outputs, strict=True):  # the shapes that the file declares
        assert all(isinstance(a, str) or a == b for a, b in zip(port.shape, value.shape, strict=True))
    return onnx_model.name_outputs(model, dict(zip(names, outputs, strict=True)))


def random_model(seed: int = 0, heads: Heads | None = None, family: str = "bert", **changes) -> NativeModel:
    config = ModelConfig(**SMALL | {"max_positions": 24} | NO_DROPOUT | changes)
    heads = heads or Heads(mlm=False)
    rng = np.random.default_rng(seed)

    def draw(path: str, leaf) -> np.ndarray:
        middle = 1.0 if path.endswith(("scale", "std", "variance")) else 0.0
        return (middle + 0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return NativeModel(family, config, heads, map_with_paths(draw, bert.shapes(config, heads)))


def batch(model: NativeModel, rows: int = 3, length: int = 11, seed: int = 1) -> ForwardInputs:
    rng = np.random.default_rng(seed)
    mask = (np.arange(length)[None] < np.linspace(length, 2, rows).astype(int)[:, None]).astype(np.int32)
    types = rng.integers(0, max(1, model.config.type_vocab_size), (rows, length)).astype(np.int32)
    return ForwardInputs(rng.integers(0, model.config.vocab_size, (rows, length)).astype(np.int32), types, mask)


def compared(outputs, reference, inputs: ForwardInputs, compare=parity_report.largest_difference):
    reference = {name: values for name, values in reference.items() if name in outputs or name.endswith("logits")}
    return parity_report.compare_outputs(outputs, reference, inputs.attention_mask_BS, library="", compare=compare)


@pytest.mark.parametrize("case", CASES)
def test_every_family_and_head_in_onnxruntime(case):
    """Recorded outputs of transformers."""
    golden, hf_model = GOLDENS[case], golden_model(case)
    model = from_huggingface(hf_model)
    outputs = in_onnxruntime(model, golden["inputs"])
    expected = {make_families.PARTS.get(part, part): values for part, values in golden["values"].items()}
    last = f"layer {model.config.num_layers}"
    assert outputs.keys() >= {name for name in expected if name.endswith("logits")}
    # A classifier that reads the mean has hidden states, too: the ModernBERT of the goldens.
    of_text = "ForSequenceClassification" in case or "ForMultipleChoice" in case
    assert (last in outputs) == (not of_text or case.startswith("ModernBert"))
    for name in outputs.keys() & expected.keys():
        found = make_families.sampled(outputs[name], golden["inputs"].attention_mask_BS)
        bound = 1e-4 * max(1, np.abs(expected[name]).max())
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "task"),
    [
        ({"head_size": 4}, None),  # as after pruning
        ({"adapter_size": 6}, None),
        ({"feed_forward": "gated", "biases": "none"}, None),
        ({"parameter_groups": 1, "embedding_size": 16}, None),
        ({"type_vocab_size": 1, "position_offset": 2, "activation": "gelu_tanh"}, None),
        ({"norm_placement": "pre", "adapter_size": 6}, None),
        ({"positions": "rotary", "rotary_base": 30.0, "head_size": 6}, None),
        ({"attention_window": 2, "global_every": 2}, None),
        (MODERN, None),
        (MODERN, TaskHead("classification", ("a", "b"), "pooled")),
        (MODERN | {"num_layers": 3}, TaskHead("tagging", ("a", "b"), "tokens", mix=True)),
        ({}, TaskHead("classification", ("a", "b", "c"), "mean", "gelu", norm=True)),
        ({}, TaskHead("classification", ("a", "b"), "pooled", mix=True)),
        ({}, TaskHead("tagging", ("a", "b"), "tokens", "relu", mix=True)),
        *(({}, TaskHead("classification", ("a", "b"), "cls", cls_norm=k)) for k in ("standardise", "batch", "layer")),
        ({}, TaskHead("classification", ("score",), "pooled", cls_norm="centre")),
    ],
)
def test_settings_that_transformers_lacks(changes, task):
    model = random_model(heads=Heads(mlm=False, task=task), **changes)
    inputs = batch(model)
    outputs, reference = in_onnxruntime(model, inputs), jax_forward.run(model, inputs)
    assert outputs and compared(outputs, reference, inputs).passed
    assert not compared(outputs, {name: -values for name, values in reference.items()}, inputs).passed


def test_batch_and_length_are_free_and_padding_changes_nothing():
    model = random_model()
    inputs = batch(model, rows=4, length=24)
    outputs = in_onnxruntime(model, inputs)["layer 2"]
    for row, length in ((0, 24), (3, 2)):
        alone = ForwardInputs(*(array[row : row + 1, :length] for array in inputs))
        np.testing.assert_allclose(in_onnxruntime(model, alone)["layer 2"][0], outputs[row, :length], atol=1e-5)


def left_padded(inputs: ForwardInputs, pad: int) -> ForwardInputs:
    """The same rows with the padding before the tokens."""
    lengths = inputs.attention_mask_BS.sum(1)
    ids = np.where(inputs.attention_mask_BS > 0, inputs.input_ids_BS, pad)
    arrays = (ids, inputs.token_type_ids_BS, inputs.attention_mask_BS)
    shift = inputs.attention_mask_BS.shape[1] - lengths
    return ForwardInputs(
        *(np.stack([np.roll(row, n) for row, n in zip(array, shift, strict=True)]) for array in arrays)
    )


@pytest.mark.parametrize(
    ("family", "runtime"),
    [("roberta", "onnxruntime"), ("roberta", "openvino"), ("roberta", "stablehlo"), ("modernbert", "onnxruntime")],
)
def test_padding_before_the_tokens(tmp_path, family, runtime):
    """RoBERTa counts positions from the first token; rotary positions are relative."""
    if runtime == "openvino":
        needs_openvino()
    changes = MODERN if family == "modernbert" else {"type_vocab_size": 1, "position_offset": 2}
    model = random_model(family=family, **changes | {"num_layers": 2})
    right = batch(model, rows=4)
    tokens = right.attention_mask_BS > 0
    hf_model = to_huggingface(model, "here")
    right = right._replace(input_ids_BS=np.where(tokens & (right.input_ids_BS != 1), right.input_ids_BS, 1 + tokens))
    left = left_padded(right, pad=1)
    expected = numpy_forward.run(hf_model, left)["layer 2"][left.attention_mask_BS > 0]
    np.testing.assert_allclose(numpy_forward.run(hf_model, right)["layer 2"][tokens], expected, atol=1e-5)
    if runtime == "onnxruntime":
        outputs = in_onnxruntime(model, left)
    else:
        output = OUTPUT_FORMATS[runtime]
        output.write(SourceModel("bert-jax", "here", model), tmp_path)
        outputs = output.graphs[0].run(tmp_path / output.graphs[0].path, model, left)
    np.testing.assert_allclose(outputs["layer 2"][left.attention_mask_BS > 0], expected, atol=1e-4)


def test_two_separate_heads_together():
    model = random_model(heads=Heads(mlm=True, pair=True))
    inputs = batch(model)
    outputs = in_onnxruntime(model, inputs)
    assert set(outputs) == {"layer 2", "mlm logits", "pair logits"}
    assert compared(outputs, jax_forward.run(model, inputs), inputs).passed


def dequantised(model: NativeModel) -> NativeModel:
    """The same model with weights that were rounded to 8 bits, by a definition of its own."""

    def round_to(path: str, leaf: np.ndarray) -> np.ndarray:
        if path == "encoder/embeddings/word":
            axes = (1,)
        elif path.endswith("kernel"):
            stacked = path.startswith("encoder/layers")
            inputs = 2 if path.endswith("attention_out/kernel") else 1
            axes = tuple(range(stacked, stacked + inputs))
        else:
            return leaf
        scale = np.abs(leaf).max(axes, keepdims=True).astype(np.float64) / 127
        return (np.round(leaf / scale) * scale).astype(np.float32)

    return model._replace(params=map_with_paths(round_to, model.params))


@pytest.mark.parametrize("family", ["bert", "albert", "modernbert"])
def test_weights_in_8_bits(family):
    """The graph for OpenVINO is the model with rounded weights, tied decoder included."""
    changes = {"albert": {"parameter_groups": 1, "embedding_size": 16}, "modernbert": MODERN}.get(family, {})
    model = random_model(heads=Heads(mlm=True, pair=True), family=family, **changes)
    inputs = batch(model)
    outputs = in_onnxruntime(model, inputs, onnx_graph.CompressedGraphBuilder)
    assert compared(outputs, jax_forward.run(dequantised(model), inputs), inputs).passed
    assert not compared(outputs, jax_forward.run(model, inputs), inputs).passed


def test_a_product_of_integers():
    """One dense layer, by the definition of DynamicQuantizeLinear."""
    rng = np.random.default_rng(0)
    x = rng.normal(1, 2, (3, 5, 16)).astype(np.float32)
    kernel = rng.normal(0, 0.1, (16, 7)).astype(np.float32)
    graph = onnx_graph.Int8GraphBuilder({})
    product = graph.multiply("x", "kernel", kernel)
    ports = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", x.shape), (product, (3, 5, 7)))
    ]
    made = onnx.helper.make_graph(graph.nodes, "one", ports[:1], ports[1:], list(graph.constants.values()))
    proto = onnx.helper.make_model(
        made, opset_imports=[onnx.helper.make_opsetid("", onnx_model.OPSET)], ir_version=onnx_model.IR_VERSION
    )
    found = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})[0]

    step = (max(x.max(), 0) - min(x.min(), 0)) / 255
    zero = np.clip(np.rint(-min(x.min(), 0) / step), 0, 255)
    integers = np.clip(np.rint(x / step) + zero, 0, 255) - zero
    scale = np.abs(kernel).max(0) / 127
    weights = np.rint(kernel / scale)
    exact = integers @ weights
    # CPUs without VNNI add the products of two neighbours in 16 bits.
    pairs = ((integers + zero)[..., None] * weights).reshape(3, 5, 8, 2, 7).sum(3)
    saturated = np.clip(pairs, -(2**15), 2**15 - 1).sum(2) - zero * weights.sum(0)
    assert (saturated != exact).any()
    assert any(np.allclose(found, one * step * scale, rtol=1e-5, atol=1e-5) for one in (exact, saturated))
    assert 1e-3 < np.abs(exact * step * scale - x @ kernel).max() < 0.1


@pytest.mark.parametrize("graph", ["Int8GraphBuilder", "CompressedGraphBuilder"])
def test_size(graph):
    model = random_model(hidden_size=256, intermediate_size=1024, vocab_size=3000)
    ratio = onnx_model.build(model, getattr(onnx_graph, graph)).ByteSize() / onnx_model.build(model).ByteSize()
    assert 0.25 < ratio < 0.27


def test_int8_is_that_of_onnxruntimes_own_tool(tmp_path):
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = random_model(num_layers=1)
    inputs = batch(model)
    onnx.save(onnx_model.build(model), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx", per_channel=True, weight_type=QuantType.QInt8)
    session = onnxruntime.InferenceSession(tmp_path / "int8.onnx")
    tool = session.run(None, onnx_files.feeds([x.name for x in session.get_inputs()], inputs))[0]
    exact = in_onnxruntime(model, inputs)["layer 1"]
    found = in_onnxruntime(model, inputs, onnx_graph.Int8GraphBuilder)["layer 1"]
    real_BS = inputs.attention_mask_BS > 0
    errors = [
        parity_report.relative_difference("", one, exact, real_BS).value for one in (found, tool)
    ]  # the tool also rounds position embeddings
    assert 0.002 < errors[0] < 1.1 * errors[1] < 0.12, errors  # 0.093 where products saturate


@pytest.fixture(scope="module")
def served(tiny_run, tmp_path_factory, only_numpy, quick_compilation):
    """Format -> what `convert` wrote of the run, and the report; read only."""
    made = {}

    def get(to: str):
        if to.startswith("openvino"):
            needs_openvino()
        if to not in made:
            directory = tmp_path_factory.mktemp("served") / to
            made[to] = directory, convert(tiny_run, directory, to, pooling="mean")
        return made[to]

    return get


@pytest.mark.parametrize("to", ["onnx", "onnx-int8", "openvino", "openvino-int8"])
def test_convert(to, served):
    directory, report = served(to)
    runtime = openvino_files if to.startswith("openvino") else onnx_files
    file = directory / (runtime.INT8_MODEL if "int8" in to else runtime.MODEL)
    assert report.passed and report.tokenizer.equal == report.tokenizer.total
    assert {path for path in file.parent.iterdir() if path.suffix != ".bin"} == {file}
    assert {part.name for part in report.differences} == {"layer 1", "mlm logits", "pair logits"}
    assert {part.measure for part in report.differences} == {"relative" if "int8" in to else "largest"}
    assert (max(part.value for part in report.differences) > 1e-3) == ("int8" in to)
    assert not sys.modules.get("openvino_telemetry")
    names = {path.name for path in directory.iterdir()}
    assert names >= {"config.json", "tokenizer.json", "vocab.txt", "README.md", "modules.json", file.parent.name}
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["BertForPreTraining"] and config["vocab_size"] > 90
    card = (directory / "README.md").read_text()
    assert f'backend="{file.parent.name}"' in card and "parity: passed" in card
    assert (f'"file_name": "{runtime.INT8_MODEL}"' in card) == ("int8" in to)
    assert ('"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}' in card) == ("computes in bfloat16" in card)
    assert ("computes in bfloat16" in card) == to.startswith("openvino")


@pytest.mark.parametrize("runtime", ["onnx", "openvino"])
def test_float_and_int8_in_one_directory(runtime, served):
    """The files of the two formats, byte for byte; the report has both, each with its measure."""
    both, report = served(f"{runtime}-both")
    names = ("layer 1", "mlm logits", "pair logits")
    files = [graph.path for graph in OUTPUT_FORMATS[f"{runtime}-both"].graphs]
    assert report.passed
    assert [(part.name, part.measure) for part in report.differences] == [
        (f"{file}: {name}", measure)
        for file, measure in zip(files, ("largest", "relative"), strict=True)
        for name in names
    ]
    lines = report.lines()
    assert lines[0].endswith("largest difference (limit)")
    assert lines[4] == "  root mean square of the difference / of the values (limit):"
    for to in (runtime, f"{runtime}-int8"):
        for file in (served(to)[0] / runtime).iterdir():
            if file.suffix != ".xml":  # has the time at which OpenVINO wrote it
                assert file.read_bytes() == (both / runtime / file.name).read_bytes()
    card = (both / "README.md").read_text()
    assert f"`{files[1]}` has the same model in int8: `SentenceTransformer" in card
    assert f'SentenceTransformer("{both.name}", backend="{runtime}"' in card
    assert card.count("file_name") == 1


SIGNAL = """
import gc, signal, sys, threading, pathlib
from bert_jax.convert.formats import openvino_files
openvino, directory = openvino_files.import_without_telemetry(), pathlib.Path(sys.argv[1])
import openvino.opset13 as operations
parameter = operations.parameter([2, 2], float)
openvino.save_model(openvino.Model([operations.relu(parameter)], [parameter]), directory / openvino_files.MODEL)
models = [openvino_files.compile_model(directory / openvino_files.MODEL)]

def release():
    models.clear()
    gc.collect()

thread = threading.Thread(target=release)
thread.start()
thread.join()
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.slow
def test_a_signal_after_openvino_is_handled(tmp_path):
    """Also if the last model was released in another thread."""
    needs_openvino()
    (tmp_path / openvino_files.MODEL).parent.mkdir()
    run = subprocess.run([sys.executable, "-c", SIGNAL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "handled\n"), run.stderr


def test_outputs_of_another_model_fail(tiny_run, tmp_path, monkeypatch):
    """The runtime's outputs are compared, in both measures; nothing is left."""
    original = onnx_model.build

    def build(model, graph):
        changed = jax.tree.map(lambda leaf: np.asarray(leaf)[..., ::-1].copy(), model.params)
        return original(model._replace(params=changed), graph)

    monkeypatch.setattr(onnx_model, "build", build)
    for to in ("onnx", "onnx-int8"):
        with pytest.raises(UserError, match=r"and the converted model differ \(layer 1 differs by"):
            convert(tiny_run, tmp_path / "served", to)
        assert list(tmp_path.iterdir()) == []


def test_outputs_without_a_known_name_fail(tiny_run, tmp_path, monkeypatch):
    """An encoder whose outputs have other names would have nothing to compare."""
    monkeypatch.setattr(onnx_model, "name_outputs", lambda model, outputs: {})
    with input_formats.open_model(tiny_run) as opened:
        source = SourceModel("run", str(tiny_run), random_model(vocab_size=120), opened.tokenizer_path)
    with pytest.raises(UserError, match=r"differ \(no output could be compared\)"):
        convert(source, tmp_path / "served", "onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "value"), [("direction", "causal"), ("feed_forward_networks", 2), ("norm", "none")])
def test_what_the_graph_lacks(name, value):
    with pytest.raises(UserError, match=rf"not of models with model\.{name} {value}: use --to stablehlo"):
        onnx_model.build(random_model(**{name: value}))


@pytest.mark.parametrize(("to", "package"), [("onnx", "onnxruntime"), ("openvino", "openvino"), ("onnx-int8", "onnx")])
def test_a_missing_package(to, package, tiny_run, tmp_path, monkeypatch):
    find_spec, extra = onnx_files.importlib.util.find_spec, to.partition("-")[0]
    monkeypatch.setattr(
        onnx_files.importlib.util, "find_spec", lambda name, *rest: None if name == package else find_spec(name, *rest)
    )
    with pytest.raises(UserError, match=re.escape(f"needs the package {package}: {install_command(extra)}")):
        convert(tiny_run, tmp_path / "served", to)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_is_too_large(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_files, "LARGEST_BYTES", 10_000)
    with pytest.raises(UserError, match=r"its graph has .* GiB, an ONNX file at most .*: use an int8 format"):
        convert(tiny_run, tmp_path / "served", "onnx")


def test_a_damaged_file(tmp_path):
    (tmp_path / "onnx").mkdir()
    (tmp_path / onnx_files.MODEL).write_bytes(b"no graph")
    with pytest.raises(UserError, match="ONNX Runtime cannot read"):
        onnx_files.open_session(tmp_path / onnx_files.MODEL)


def test_a_model_that_transformers_lacks_is_converted(tiny_run, tmp_path):
    """With adapters: config.json is written, the reference is bert_jax."""
    with input_formats.open_model(tiny_run) as source_model:
        config = dataclasses.replace(source_model.model.config, adapter_size=4)
        model = random_model(**{name: getattr(config, name) for name in SMALL}, adapter_size=4)
        changed = SourceModel("run", str(tiny_run), model, source_model.tokenizer_path)
    report = convert(changed, tmp_path / "served", "onnx")
    assert report.passed and "transformers has no such model" in report.library
    assert json.loads((tmp_path / "served/config.json").read_text())["model_type"] == "bert"
