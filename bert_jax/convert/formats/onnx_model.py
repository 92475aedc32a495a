"""An encoder with its heads as an ONNX model, built from the parameters of bert_jax without a tracer.

Inputs and outputs have the names of transformers' classes; batch and length are free, ids are int64.

Shapes in names: B rows, S positions, H hidden, N heads, D head size.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from bert_jax import __version__
from bert_jax.config import ModelConfig
from bert_jax.convert.formats.onnx_graph import FloatGraphBuilder
from bert_jax.convert.forward_types import ForwardOutputs
from bert_jax.convert.translate import NativeModel
from bert_jax.errors import UserError
from bert_jax.model.cls_norm import EPSILON as CLS_NORM_EPSILON
from bert_jax.model.layer_plan import NormPlacement, layer_plans, parameter_groups
from bert_jax.training.param_paths import name_leaves

OPSET, IR_VERSION = 20, 9
"""GELU is an operator since opset 20, LayerNormalization since 17."""
HIDDEN, POOLED, LOGITS, PAIR = "last_hidden_state", "pooler_output", "logits", "seq_relationship_logits"
SPAN = ("start_logits", "end_logits")
"""Names of outputs in transformers."""
MASKED = -1e4
"""Added to the scores of padding: its exponential is 0 in float32, and the number exists in float16."""


def build(model: NativeModel, graph_class: type[FloatGraphBuilder] = FloatGraphBuilder) -> onnx.ModelProto:
    """The model as a graph.

    Args:
      model: to write.
      graph_class: `FloatGraphBuilder`, `CompressedGraphBuilder` or `Int8GraphBuilder`.

    Raises:
      UserError: the encoder has a part that the graph lacks (e.g. causal attention).
    """
    config = model.config
    _refuse_unsupported(config)
    graph, reads_cls = graph_class(name_leaves(model.params)), model.heads.reads_cls_only
    plans = layer_plans(config)
    biases = _attention_biases(graph, [plan.window for plan in plans])
    rotations = _rotations(graph, config, [plan.rotary_base for plan in plans])
    hidden = _embed(graph, config)
    states = [hidden]
    for layer, (plan, group) in enumerate(zip(plans, parameter_groups(config), strict=True)):
        only_cls = reads_cls and layer == config.num_layers - 1
        bias, rotation = biases[plan.window], rotations[plan.rotary_base]
        hidden = _layer(graph, config, plan.norm_placement, group, hidden, bias, rotation, only_cls=only_cls)
        states.append(hidden)
    if config.norm_placement == "pre":
        hidden = states[-1] = graph.norm(hidden, "encoder/final_norm", config.norm_epsilon)
    outputs = _heads(graph, model, states)
    if not reads_cls:
        outputs = {HIDDEN: hidden} | outputs
    return _finish(graph, model, outputs)


def _refuse_unsupported(config: ModelConfig) -> None:
    """Raise UserError for settings of encoders that the graph lacks."""
    supported = {
        "direction": "bidirectional",
        "embeddings": "tokens",
        "bottleneck_size": None,
        "feed_forward_networks": 1,
        "norm": "layer",
    }
    for name, value in supported.items():
        if getattr(config, name) != value:
            raise UserError(
                f"ONNX and OpenVINO files are written of BERT, RoBERTa, DistilBERT, ELECTRA, ALBERT and ModernBERT, "
                f"not of models with model.{name} {getattr(config, name)}: use --to stablehlo"
            )


def _embed(graph: FloatGraphBuilder, config: ModelConfig) -> str:
    at = "encoder/embeddings"
    total = graph.look_up(f"{at}/word", "input_ids")
    if config.positions == "learned":
        total = graph.add("Add", total, _positions(graph, config))
    if config.type_vocab_size == 1:
        total = graph.add("Add", total, graph.constant(f"{at}/token_type", graph.parameter(f"{at}/token_type")[0]))
    elif config.type_vocab_size:
        table = graph.constant(f"{at}/token_type", graph.parameter(f"{at}/token_type"))
        total = graph.add("Add", total, graph.add("Gather", table, "token_type_ids"))
    embedded = graph.norm(total, f"{at}/norm", config.norm_epsilon)
    return graph.dense(embedded, f"{at}/projection") if config.embedding_size is not None else embedded


def _positions(graph: FloatGraphBuilder, config: ModelConfig) -> str:
    """Position embeddings: [S, H], or [B, S, H] of RoBERTa, which counts tokens, so that padding may be on either side.

    As in transformers, padding has the row before that of the first token (jax_forward.py).
    """
    path = "encoder/embeddings/position"
    if config.position_offset:
        table = graph.constant(path, graph.parameter(path)[config.position_offset - 1 :])
        count = graph.add("CumSum", "attention_mask", graph.constant("axis_1", np.array(1, np.int64)))
        return graph.add("Gather", table, graph.add("Mul", count, "attention_mask"))
    return _first_rows(graph, graph.constant(path, graph.parameter(path)))


def _first_rows(graph: FloatGraphBuilder, table: str) -> str:
    """The rows of a table for the positions 0 to S - 1."""
    return graph.add("Slice", table, graph.integers(0), graph.add("Shape", "input_ids", start=1, end=2))


def _attention_biases(graph: FloatGraphBuilder, windows: Iterable[int | None]) -> dict[int | None, str]:
    """By window: [B, 1, 1, S], or [B, 1, S, S] of a local layer. 0 at tokens in reach, MASKED or less elsewhere."""
    mask = graph.add("Unsqueeze", graph.add("Cast", "attention_mask", to=TensorProto.FLOAT), graph.integers(1, 2))
    padding = graph.add("Mul", graph.add("Sub", graph.number(1.0), mask), graph.number(MASKED))
    biases = {}
    for window in dict.fromkeys(windows):
        biases[window] = padding if window is None else graph.add("Add", padding, _outside(graph, window))
    return biases


def _outside(graph: FloatGraphBuilder, window: int) -> str:
    """[S, S]: 0 where key and query are at most `window` positions apart, else MASKED."""
    first, step = (graph.constant(f"position_{i}", np.array(i, np.int64)) for i in (0, 1))
    positions = graph.add("Range", first, graph.add("Squeeze", graph.add("Shape", "input_ids", start=1, end=2)), step)
    distance = graph.add("Abs", graph.add("Sub", positions, graph.add("Unsqueeze", positions, graph.integers(1))))
    far = graph.add("Greater", distance, graph.constant(f"window_{window}", np.array(window, np.int64)))
    return graph.add("Mul", graph.add("Cast", far, to=TensorProto.FLOAT), graph.number(MASKED))


def _rotations(
    graph: FloatGraphBuilder, config: ModelConfig, bases: Iterable[float | None]
) -> dict[float | None, tuple[str, str] | None]:
    """By rotary base: cosine and sine of the angles of positions, [S, 1, D / 2] (Su et al. 2021, section 3.4)."""
    half, rotations = config.size_per_head // 2, {None: None}
    for base in dict.fromkeys(base for base in bases if base is not None):
        angles = np.arange(config.max_positions)[:, None, None] * base ** (-np.arange(half) / half)
        rotations[base] = tuple(
            _first_rows(graph, graph.constant(f"rotary_{base!r}/{of.__name__}", of(angles).astype(np.float32)))
            for of in (np.cos, np.sin)
        )
    return rotations


def _rotate(graph: FloatGraphBuilder, x: str, rotation: tuple[str, str], half: int) -> str:
    """[B, S, N, D] with elements i and i + D / 2 rotated."""
    cosine, sine = rotation
    first, second = (
        graph.add("Slice", x, graph.integers(start), graph.integers(start + half), graph.integers(3))
        for start in (0, half)
    )
    low = graph.add("Sub", graph.add("Mul", first, cosine), graph.add("Mul", second, sine))
    high = graph.add("Add", graph.add("Mul", second, cosine), graph.add("Mul", first, sine))
    return graph.add("Concat", low, high, axis=-1)


def _layer(
    graph: FloatGraphBuilder,
    config: ModelConfig,
    placement: NormPlacement,
    group: int,
    hidden: str,
    bias: str,
    rotation: tuple[str, str] | None,
    *,
    only_cls: bool,
) -> str:
    """One layer; with `only_cls`, of [CLS] alone, [B, 1, H]."""
    at = "encoder/layers"

    def norm(name: str, x: str, *placements: NormPlacement) -> str:
        return graph.norm(x, f"{at}/{name}", config.norm_epsilon, group) if placement in placements else x

    before = norm("attention_norm", hidden, NormPlacement.PRE)
    attended = _attend(graph, config, group, before, bias, rotation, only_cls=only_cls)
    attended = graph.dense(attended, f"{at}/attention_out", group, inputs=2)
    attended = _adapt(graph, attended, f"{at}/attention_adapter", group)
    residual = graph.add("Gather", hidden, graph.integers(0), axis=1) if only_cls else hidden
    hidden = norm("attention_norm", graph.add("Add", attended, residual), NormPlacement.POST)
    before = norm("feed_forward_norm", hidden, NormPlacement.PRE, NormPlacement.PRE_FEED_FORWARD)
    up = graph.dense(before, f"{at}/up", group)
    if config.feed_forward == "gated":
        up = graph.add("Mul", graph.activate(graph.dense(before, f"{at}/gate", group), config.activation), up)
    else:
        up = graph.activate(up, config.activation)
    down = _adapt(graph, graph.dense(up, f"{at}/down", group), f"{at}/feed_forward_adapter", group)
    return norm("feed_forward_norm", graph.add("Add", down, hidden), NormPlacement.POST)


def _attend(
    graph: FloatGraphBuilder,
    config: ModelConfig,
    group: int,
    hidden: str,
    bias: str,
    rotation: tuple[str, str] | None,
    *,
    only_cls: bool,
) -> str:
    """What the heads send to the output projection [B, S, N * D]."""
    heads, queries = graph.integers(0, 0, config.num_heads, config.size_per_head), hidden
    if only_cls:
        queries = graph.add("Gather", hidden, graph.integers(0), axis=1)
        bias = graph.add("Gather", bias, graph.integers(0), axis=2)
    query, key, value = (
        graph.add("Reshape", graph.dense(x, "encoder/layers/qkv", group, part), heads)
        for part, x in enumerate((queries, hidden, hidden))
    )
    if rotation is not None:
        key = _rotate(graph, key, rotation, config.size_per_head // 2)
        if not only_cls:  # at position 0, the angles are 0
            query = _rotate(graph, query, rotation, config.size_per_head // 2)
    query = graph.add("Transpose", query, perm=[0, 2, 1, 3])
    key = graph.add("Transpose", key, perm=[0, 2, 3, 1])
    value = graph.add("Transpose", value, perm=[0, 2, 1, 3])
    scores = graph.add("Div", graph.add("MatMul", query, key), graph.number(math.sqrt(config.size_per_head)))
    weights = graph.add("Softmax", graph.add("Add", scores, bias), axis=-1)
    context = graph.add("Transpose", graph.add("MatMul", weights, value), perm=[0, 2, 1, 3])
    return graph.add("Reshape", context, graph.integers(0, 0, config.num_heads * config.size_per_head))


def _adapt(graph: FloatGraphBuilder, x: str, path: str, group: int) -> str:
    """x through an adapter (Houlsby et al. 2019), if the model has adapters."""
    if not graph.has(f"{path}/down/kernel"):
        return x
    inner = graph.activate(graph.dense(x, f"{path}/down", group), "gelu")
    return graph.add("Add", x, graph.dense(inner, f"{path}/up", group))


def _heads(graph: FloatGraphBuilder, model: NativeModel, states: Sequence[str]) -> dict[str, str]:
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


def _task(graph: FloatGraphBuilder, model: NativeModel, states: Sequence[str]) -> dict[str, str]:
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


def _mix(graph: FloatGraphBuilder, states: Sequence[str]) -> str:
    scores = graph.parameter("task/mix/weights")
    exponentials = np.exp(scores - scores.max())
    weights = graph.parameter("task/mix/scale") * exponentials / exponentials.sum()
    scaled = [graph.add("Mul", state, graph.number(float(w))) for state, w in zip(states, weights, strict=True)]
    return graph.add("Sum", *scaled)


def _mean(graph: FloatGraphBuilder, x: str) -> str:
    """Mean over the tokens of each row."""
    mask = graph.add("Unsqueeze", graph.add("Cast", "attention_mask", to=TensorProto.FLOAT), graph.integers(2))
    axes = graph.integers(1)
    total = graph.add("ReduceSum", graph.add("Mul", x, mask), axes, keepdims=0)
    count = graph.add("Max", graph.add("ReduceSum", mask, axes, keepdims=0), graph.number(1.0))
    return graph.add("Div", total, count)


def _normalise_cls(graph: FloatGraphBuilder, x: str, kind: str, epsilon: float) -> str:
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


def _finish(graph: FloatGraphBuilder, model: NativeModel, outputs: Mapping[str, str]) -> onnx.ModelProto:
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
