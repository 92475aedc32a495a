"""An encoder with its heads as an ONNX model, built from the parameters of bert_jax without a tracer.

Inputs and outputs have the names of transformers' classes; batch and length are free, ids are int64.

Shapes in names: B rows, S positions, H hidden, N heads, D head size.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from bert_jax import __version__
from bert_jax.config import ModelConfig
from bert_jax.convert.formats.onnx_graph import FloatGraph
from bert_jax.convert.forward_types import ForwardOutputs
from bert_jax.convert.translate import NativeModel
from bert_jax.errors import UserError
from bert_jax.model.cls_norm import EPSILON as CLS_NORM_EPSILON
from bert_jax.model.layer_plan import parameter_groups
from bert_jax.training.param_paths import name_leaves

OPSET, IR_VERSION = 20, 9
"""GELU is an operator since opset 20, LayerNormalization since 17."""
HIDDEN, POOLED, LOGITS, PAIR = "last_hidden_state", "pooler_output", "logits", "seq_relationship_logits"
SPAN = ("start_logits", "end_logits")
"""Names of outputs in transformers."""
MASKED = -1e4
"""Added to the scores of padding: its exponential is 0 in float32, and the number exists in float16."""


def build(model: NativeModel, graph_class: type[FloatGraph] = FloatGraph) -> onnx.ModelProto:
    """The model as a graph.

    Args:
      model: to write.
      graph_class: `FloatGraph`, `CompressedGraph` or `Int8Graph`.

    Raises:
      UserError: the encoder has a part that the graph lacks (rotary positions, local attention, pre-norm, causal).
    """
    config = model.config
    _refuse_unsupported(config)
    graph, reads_cls = graph_class(name_leaves(model.params)), model.heads.reads_cls_only
    bias = _attention_bias(graph)
    hidden = _embed(graph, config)
    states = [hidden]
    for layer, group in enumerate(parameter_groups(config)):
        last = layer == config.num_layers - 1
        hidden = _layer(graph, config, group, hidden, bias, only_cls=last and reads_cls)
        states.append(hidden)
    outputs = _heads(graph, model, states)
    if not reads_cls:
        outputs = {HIDDEN: hidden} | outputs
    return _finish(graph, model, outputs)


def _refuse_unsupported(config: ModelConfig) -> None:
    """Raise UserError for settings of encoders that the graph lacks."""
    supported = {
        "positions": "learned",
        "norm_placement": "post",
        "attention_window": None,
        "direction": "bidirectional",
        "embeddings": "tokens",
        "bottleneck_size": None,
        "feed_forward_networks": 1,
        "norm": "layer",
    }
    for name, value in supported.items():
        if getattr(config, name) != value:
            raise UserError(
                f"ONNX and OpenVINO files are written of BERT, RoBERTa, DistilBERT, ELECTRA and ALBERT, not of models "
                f"with model.{name} {getattr(config, name)}: use --to stablehlo"
            )


def _embed(graph: FloatGraph, config: ModelConfig) -> str:
    at = "encoder/embeddings"
    total = graph.look_up(f"{at}/word", "input_ids")
    total = graph.add("Add", total, _positions(graph, config))
    if config.type_vocab_size == 1:
        total = graph.add("Add", total, graph.constant(f"{at}/token_type", graph.parameter(f"{at}/token_type")[0]))
    elif config.type_vocab_size:
        table = graph.constant(f"{at}/token_type", graph.parameter(f"{at}/token_type"))
        total = graph.add("Add", total, graph.add("Gather", table, "token_type_ids"))
    embedded = graph.norm(total, f"{at}/norm", config.norm_epsilon)
    return graph.dense(embedded, f"{at}/projection") if config.embedding_size is not None else embedded


def _positions(graph: FloatGraph, config: ModelConfig) -> str:
    """Position embeddings: [S, H], or [B, S, H] of RoBERTa, which counts tokens, so that padding may be on either side.

    As in transformers, padding has the row before that of the first token (jax_forward.py).
    """
    path = "encoder/embeddings/position"
    if config.position_offset:
        table = graph.constant(path, graph.parameter(path)[config.position_offset - 1 :])
        count = graph.add("CumSum", "attention_mask", graph.constant("axis_1", np.array(1, np.int64)))
        return graph.add("Gather", table, graph.add("Mul", count, "attention_mask"))
    length = graph.add("Shape", "input_ids", start=1, end=2)
    return graph.add("Slice", graph.constant(path, graph.parameter(path)), graph.integers(0), length)


def _attention_bias(graph: FloatGraph) -> str:
    """[B, 1, 1, S]: 0 at tokens, MASKED at padding."""
    mask = graph.add("Unsqueeze", graph.add("Cast", "attention_mask", to=TensorProto.FLOAT), graph.integers(1, 2))
    return graph.add("Mul", graph.add("Sub", graph.number(1.0), mask), graph.number(MASKED))


def _layer(graph: FloatGraph, config: ModelConfig, group: int, hidden: str, bias: str, *, only_cls: bool) -> str:
    """One layer that normalises after the residual sums; with `only_cls`, of [CLS] alone, [B, 1, H]."""
    at, epsilon = "encoder/layers", config.norm_epsilon
    queries = graph.add("Gather", hidden, graph.integers(0), axis=1) if only_cls else hidden
    context = _attend(graph, config, group, queries, hidden, bias)
    attended = graph.dense(context, f"{at}/attention_out", group, inputs=2)
    attended = _adapt(graph, attended, f"{at}/attention_adapter", group)
    hidden = graph.norm(graph.add("Add", attended, queries), f"{at}/attention_norm", epsilon, group)
    up = graph.dense(hidden, f"{at}/up", group)
    if config.feed_forward == "gated":
        up = graph.add("Mul", graph.activate(graph.dense(hidden, f"{at}/gate", group), config.activation), up)
    else:
        up = graph.activate(up, config.activation)
    down = _adapt(graph, graph.dense(up, f"{at}/down", group), f"{at}/feed_forward_adapter", group)
    return graph.norm(graph.add("Add", down, hidden), f"{at}/feed_forward_norm", epsilon, group)


def _attend(graph: FloatGraph, config: ModelConfig, group: int, queries: str, hidden: str, bias: str) -> str:
    """What the heads send to the output projection [B, S, N * D]."""
    heads = graph.integers(0, 0, config.num_heads, config.size_per_head)
    query, key, value = (
        graph.add("Reshape", graph.dense(x, "encoder/layers/qkv", group, part), heads)
        for part, x in enumerate((queries, hidden, hidden))
    )
    query = graph.add("Transpose", query, perm=[0, 2, 1, 3])
    key = graph.add("Transpose", key, perm=[0, 2, 3, 1])
    value = graph.add("Transpose", value, perm=[0, 2, 1, 3])
    scores = graph.add("Div", graph.add("MatMul", query, key), graph.number(math.sqrt(config.size_per_head)))
    weights = graph.add("Softmax", graph.add("Add", scores, bias), axis=-1)
    context = graph.add("Transpose", graph.add("MatMul", weights, value), perm=[0, 2, 1, 3])
    return graph.add("Reshape", context, graph.integers(0, 0, config.num_heads * config.size_per_head))


def _adapt(graph: FloatGraph, x: str, path: str, group: int) -> str:
    """x through an adapter (Houlsby et al. 2019), if the model has adapters."""
    if not graph.has(f"{path}/down/kernel"):
        return x
    inner = graph.activate(graph.dense(x, f"{path}/down", group), "gelu")
    return graph.add("Add", x, graph.dense(inner, f"{path}/up", group))


def _heads(graph: FloatGraph, model: NativeModel, states: Sequence[str]) -> dict[str, str]:
    """The outputs of the heads, by the names of transformers."""
    config, heads, outputs, hidden = model.config, model.heads, {}, states[-1]
    if heads.mlm:
        x = graph.activate(graph.dense(hidden, "mlm/transform"), heads.mlm_activation or config.activation)
        product = graph.decode(graph.norm(x, "mlm/norm", config.norm_epsilon), "encoder/embeddings/word")
        outputs[LOGITS] = graph.add("Add", product, graph.constant("mlm/bias", graph.parameter("mlm/bias")))
    if heads.pair or (heads.pooler and heads.task is None):
        pooled = graph.activate(graph.dense(graph.first_position(hidden), "encoder/pooler"), "tanh")
        outputs |= {PAIR: graph.dense(pooled, "pair/dense")} if heads.pair else {POOLED: pooled}
    if heads.task is not None:
        outputs |= _task(graph, model, states)
    return outputs


def _task(graph: FloatGraph, model: NativeModel, states: Sequence[str]) -> dict[str, str]:
    """The outputs of the task head (model/heads.py)."""
    config, task = model.config, model.heads.task
    x = _mix(graph, states) if task.mix else states[-1]
    if task.reads == "mean":
        x = _mean(graph, x)
    elif task.reads != "tokens":
        x = graph.first_position(x)
    x = _normalise_cls(graph, x, task.cls_norm, config.norm_epsilon)
    if task.reads == "pooled":
        x = graph.activate(graph.dense(x, "encoder/pooler"), "tanh")
    if task.activation != "none":
        x = graph.activate(graph.dense(x, "task/dense"), task.activation)
    if task.norm:
        x = graph.norm(x, "task/norm", config.norm_epsilon)
    logits = graph.dense(x, "task/output")
    if task.kind == "span":
        return {
            name: graph.add("Gather", logits, graph.constant(f"position_{i}", np.array(i, np.int64)), axis=2)
            for i, name in enumerate(SPAN)
        }
    if task.kind == "replaced":
        logits = graph.add("Squeeze", logits, graph.integers(2))
    return {LOGITS: logits}


def _mix(graph: FloatGraph, states: Sequence[str]) -> str:
    scores = graph.parameter("task/mix/weights")
    exponentials = np.exp(scores - scores.max())
    weights = graph.parameter("task/mix/scale") * exponentials / exponentials.sum()
    scaled = [graph.add("Mul", state, graph.number(float(w))) for state, w in zip(states, weights, strict=True)]
    return graph.add("Sum", *scaled)


def _mean(graph: FloatGraph, x: str) -> str:
    """Mean over the tokens of each row."""
    mask = graph.add("Unsqueeze", graph.add("Cast", "attention_mask", to=TensorProto.FLOAT), graph.integers(2))
    axes = graph.integers(1)
    total = graph.add("ReduceSum", graph.add("Mul", x, mask), axes, keepdims=0)
    count = graph.add("Max", graph.add("ReduceSum", mask, axes, keepdims=0), graph.number(1.0))
    return graph.add("Div", total, count)


def _normalise_cls(graph: FloatGraph, x: str, kind: str, epsilon: float) -> str:
    """What model/cls_norm.py does outside of training: LayerNorm, or a factor and an offset for every feature."""
    at = "task/cls_norm"
    if kind == "none":
        return x
    if kind == "layer":
        return graph.norm(x, at, epsilon)
    mean, factor, offset = graph.parameter(f"{at}/mean"), np.float32(1.0), np.float32(0.0)
    if kind == "standardise":
        factor = 1.0 / (graph.parameter(f"{at}/std") + CLS_NORM_EPSILON)
    elif kind == "batch":
        factor = graph.parameter(f"{at}/scale") / np.sqrt(graph.parameter(f"{at}/variance") + CLS_NORM_EPSILON)
        offset = graph.parameter(f"{at}/bias")
    centred = graph.add("Sub", x, graph.constant(f"{at}/mean", mean))
    scaled = graph.add("Mul", centred, graph.constant(f"{at}/factor", np.asarray(factor, np.float32)))
    return graph.add("Add", scaled, graph.constant(f"{at}/offset", np.asarray(offset, np.float32)))


def _finish(graph: FloatGraph, model: NativeModel, outputs: Mapping[str, str]) -> onnx.ModelProto:
    """The checked model with named inputs and outputs."""
    axes, shapes = ("batch_size", "sequence_length"), _output_shapes(model)
    names = {value: name for name, value in outputs.items()}
    for node in graph.nodes:
        for field in (node.input, node.output):
            field[:] = [names.get(value, value) for value in field]
    made = helper.make_graph(
        graph.nodes,
        model.family,
        [helper.make_tensor_value_info(name, TensorProto.INT64, axes) for name in input_names(model.config)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in outputs],
        list(graph.constants.values()),
    )
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(
        made, producer_name="bert_jax", producer_version=__version__, opset_imports=opsets, ir_version=IR_VERSION
    )


def input_names(config: ModelConfig) -> tuple[str, ...]:
    """The inputs of a model's graph, as in transformers."""
    return "input_ids", "attention_mask", *(("token_type_ids",) if config.type_vocab_size > 1 else ())


def _output_shapes(model: NativeModel) -> dict[str, tuple[str | int, ...]]:
    """Of every output that a model may have."""
    rows, positions = axes = "batch_size", "sequence_length"
    config, task = model.config, model.heads.task
    shapes = {HIDDEN: (*axes, config.hidden_size), POOLED: (rows, config.hidden_size), PAIR: (rows, 2)}
    shapes |= dict.fromkeys(SPAN, axes)
    if task is None:
        logits = (*axes, config.vocab_size)
    elif task.kind == "replaced":
        logits = axes
    else:
        logits = (rows, *((positions,) if task.reads == "tokens" else ()), len(task.labels))
    return shapes | {LOGITS: logits}


def name_outputs(model: NativeModel, outputs: Mapping[str, np.ndarray]) -> ForwardOutputs:
    """Outputs of a graph by their names in the parity report."""
    named = {HIDDEN: f"layer {model.config.num_layers}", POOLED: "pooled vector", PAIR: "pair logits"}
    named[LOGITS] = "mlm logits" if model.heads.task is None else "task logits"
    arrays = {named[name]: array for name, array in outputs.items() if name in named}
    if SPAN[0] in outputs:
        arrays["task logits"] = np.stack([outputs[name] for name in SPAN], -1)
    if model.heads.task is not None and model.heads.task.kind == "replaced":
        arrays["task logits"] = arrays["task logits"][..., None]
    return arrays
