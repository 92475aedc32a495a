"""Predicted step time by a simple model of the machine: work of each kind divided by the rate for that kind.

All assumptions of the model:

| kind | seconds on each device |
|---|---|
| matmul | FLOPs of all matrix products, with recomputation, at the chip's peak for their types x its efficiency |
| hidden | `HIDDEN_ACCESSES` per element of the residual stream and layer at memory bandwidth, or elementwise operations at the vector rate, whichever takes longer |
| scores | the same for attention probabilities, `SCORE_ACCESSES` each; with kernels (`cudnn`, `pallas_gpu`, `pallas_tpu`) their elementwise operations at the vector rate |
| logits | the same for the loss over the vocabulary, `LOGIT_BYTES` each |
| parameters | `WEIGHT_BYTES` per parameter and micro-batch, `ACCUMULATE_BYTES` more when gradients are accumulated, and the optimizer's `step_bytes` per step |
| data, fsdp, tensor, network | bytes sent along the axis, or between slices, divided by the bandwidth of the links that it uses |

- The kinds do not overlap: the step time is their sum. Communication does not overlap with computation, because the
  step gathers before its loop over micro-batches and reduces after it; overlap by XLA at the edges is ignored.
- Collectives: the step (training/programs.py) gathers parameters over fsdp, kernels of layers in the compute type, and
  reduces gradients once per step, by a reduce-scatter over fsdp and then a reduction over data, in
  `optimizer.reduce_dtype`. XLA splits matrix products over tensor, which
  costs all-reduces in every layer of every micro-batch. They are rings in all dimensions of the torus at once: an
  all-gather or reduce-scatter of V bytes over n devices sends (n - 1)/n V from each device, an all-reduce twice that.
  Between slices, only the part of a device after the reduce-scatter crosses the network.
- With `model.dense_dtype float8`, finding the largest values and rounding cost nothing, as if fused (not measured).
- With `model.dense_dtype int8`, products take the time of those in the compute type (on accelerators not measured).
- Recomputed layers (`model.remat`) cost their products again; the additional memory traffic is assumed to equal that
  of storing them ("dots" was no slower than "none" on a CPU, see docs/log/pods.md, 2026-11-21).
- Reading rows, dispatch, checkpoints, evaluation and failures cost nothing; all devices are equally fast.
- Efficiencies are part of the chip (chips.py): fitted to published runs of other programs for accelerators, to own
  measurements on a CPU.
"""  # noqa: E501

import math
from typing import Literal, NamedTuple

from bert_jax.chips import Chip, Sizes
from bert_jax.config import Config, ModelConfig
from bert_jax.config.sections import FUSED_ATTENTION
from bert_jax.model.flops import layer_weights, projection_weights
from bert_jax.planning.workload import Workload, even_shard_size, norm_widths, workload
from bert_jax.training.pretraining_task import train_step_flops

ERROR = 0.3
"""Error of predicted step times, as a share: no prediction differs more from a published rate that its efficiencies
were fitted to (planning/published_runs.py). That two meshes on one chip differ by less is not known; it is assumed for
their comparison, too."""

HIDDEN_ACCESSES = 45.0
"""Reads and writes of an element of [tokens, H] per layer, forward and backward, feed-forward width included: what
XLA does not fuse moves about 90 H bytes per token and layer in bfloat16 (estimated, not measured)."""
SCORE_ACCESSES = 15.0
"""Reads and writes of an attention probability, forward and backward: scores, softmax, dropout and their
gradients; about 30 bytes in bfloat16 (estimated, not measured)."""
LOGIT_BYTES = 28.0
"""Per logit: float32, written, read for maximum, sum and gradient; the gradient written and read by two products."""
WEIGHT_BYTES = 12.0
"""Per parameter and micro-batch: read forward and backward, gradient written, float32."""
ACCUMULATE_BYTES = 12.0
"""Per parameter and micro-batch, when there are several: gradient read, sum read and written, float32."""

# Elementwise operations, counted in the code by tests/planning/test_estimates.py; exp, erf and tanh count as 20.
HASH_OPS = 6.0
"""Of dropout per element and pass: five of its bits (model/dropout.py) and a comparison. No pass stores the mask."""
MASK_OPS = 2.0
"""Of dropout besides, outside of kernels: division and selection."""
ACTIVATION_OPS = {"gelu": 69.0, "gelu_tanh": 65.0, "relu": 3.0}
"""Per element of the feed-forward width, forward and backward; on GPUs, whose `gelu` is another, 86."""
SOFTMAX_OPS = 36.0
"""Per probability or logit, forward and backward, with the scale and the mask of scores."""
KERNEL_OPS = 27.0, 32.5
"""Per pair of a query and a key in kernels of attention, forward and backward, without dropout. Those of `pallas_tpu`:
with dropout 71.5 in all; `pallas_gpu` has 60 instructions per pair for an H200 (docs/log/model.md, 2026-11-26)."""
NORM_OPS = 19.0
"""Operations of a LayerNorm with its residual per element, forward and backward."""

ALL_REDUCES = {"none": 4, "dots": 4, "full": 6}
"""All-reduces of a layer's activations over tensor, by remat: outputs of attention and feed-forward, gradients of both
inputs, and with `full` both outputs again. The last layer counts in full, although most of its have fewer positions."""

Bound = Literal["compute", "memory", "links"]
BytesSent = dict[str, float]
"""Bytes that each device sends in one step: along `data` (inside a slice), `fsdp` and `tensor`, and over `network`
(between slices)."""


class Prediction(NamedTuple):
    """Prediction for one step."""

    seconds: dict[str, float]
    """Seconds by kind; their sum is `step_seconds`."""
    bound: Bound
    """Bottleneck with the largest share of the step time."""
    flops: float
    """FLOPs that the model needs, over all devices (model/flops.py), without recomputation."""
    mfu: float
    """Model FLOP/s as a share of all chips' bfloat16 peak."""
    sent: BytesSent

    @property
    def step_seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())


def predict(
    config: Config, phase: int, sizes: Sizes, accumulation: int, chip: Chip, sent: BytesSent | None = None
) -> Prediction:
    """Predict the time of a step of a phase at its full batch size, and its bottleneck.

    Args:
      config, phase, sizes, accumulation: as for `workload`.
      chip: kind of the devices.
      sent: bytes that a compiled program sends; None: computed from the shapes of the step.

    Raises:
      UserError: rows or heads are not divisible by the mesh.
    """
    work = workload(config, phase, sizes, accumulation)
    models = work.models
    sent = _sum_by_kind([expected_bytes_sent(one) for one in models]) if sent is None else sent
    share = 1.0 if work.bytes_per_activation == 2 else chip.float32_share
    dense_share = chip.float8_share if work.model.dense_dtype == "float8" else share
    dense = sum(map(dense_flops, models))
    peak_seconds = dense / dense_share + (sum(map(program_flops, models)) - dense) / share
    seconds = {"matmul": peak_seconds / (chip.peak_flops * chip.efficiency.matmul)}
    bounds: dict[Bound, float] = {"compute": seconds["matmul"], "memory": 0.0, "links": 0.0}
    of_models = [elementwise_work(one) for one in models]
    all_moved, all_operations = (_sum_by_kind([{k: v[i] for k, v in one.items()} for one in of_models]) for i in (0, 1))
    for kind, moved in all_moved.items():
        operations = all_operations[kind]
        by_memory = moved / (chip.memory_bandwidth * getattr(chip.efficiency, kind))
        by_vector = operations / chip.vector_ops
        seconds[kind] = max(by_memory, by_vector)
        bounds["memory" if by_memory >= by_vector else "compute"] += seconds[kind]
    links = link_seconds(sent, sizes, chip)
    seconds |= links
    bounds["links"] = sum(links.values())
    flops = train_step_flops(config, phase, config.phases[phase].batch_size)
    mfu = flops / (sum(seconds.values()) * chip.peak_flops * sizes.devices)
    return Prediction(seconds, max(bounds, key=bounds.__getitem__), flops, mfu, sent)


def _sum_by_kind(parts: list[dict[str, float]]) -> dict[str, float]:
    return {kind: sum(part[kind] for part in parts) for kind in parts[0]}


def program_flops(work: Workload) -> float:
    """FLOPs of the matrix products of one of the step's models that one device computes.

    They differ from those of the model (model/flops.py): attention windows are masked, not skipped; the head is padded
    to the maximum number of predictions of a packed row; `model.remat` recomputes; and the last layer computes keys and
    values everywhere, but all else only at positions that are read.
    """
    model, tensor = work.model, work.sizes.tensor
    adapters = 8 * model.layer_width * (model.adapter_size or 0)  # every device of the tensor axis computes all of it
    attention = 4 * model.num_heads * model.size_per_head * work.seq_len / tensor
    attention_passes = 3 if model.remat == "none" else 4
    tokens = work.micro_batch_tokens
    layers = work.effective_num_layers * tokens * (_passes(model) * adapters + attention_passes * attention)
    projection = 2 * projection_weights(model)
    outputs = model.hidden_size + even_shard_size(model.vocab_size, tensor)
    head = work.rows * work.predictions * 2 * model.decoder_width * outputs
    once = dense_flops(work) + work.update.flops
    return once + work.micro_batches * (layers + 3 * (head + tokens * projection))


def dense_flops(work: Workload) -> float:
    """Those of `program_flops` in the dense layers of the encoder layers, without adapters."""
    weights, tensor = layer_weights(work.model), work.sizes.tensor
    # Bottleneck projections are not split over tensor; those into it are computed everywhere, as keys and values are.
    layer = 2 * (weights.enter + weights.leave) + 2 * (weights.keys_and_values + weights.others) / tensor
    everywhere = 2 * weights.enter + 2 * weights.keys_and_values / tensor
    layers = work.effective_num_layers * layer + (1 - work.last_layer_share) * everywhere
    return work.micro_batches * work.micro_batch_tokens * _passes(work.model) * layers


def _passes(model: ModelConfig) -> int:
    """How often a step computes the products of a dense layer: forward, for both gradients, and recomputed."""
    return 4 if model.remat == "full" else 3


def elementwise_work(work: Workload) -> dict[str, tuple[float, float]]:
    """Bytes moved and elementwise operations of one device in a step, by kind."""
    model, parameters = work.model, work.parameters
    micro, layers = work.micro_batches, work.micro_batches * work.effective_num_layers
    passes = 3 if model.remat == "full" else 2
    # The accesses are counted for the two norms of a plain layer.
    hidden = layers * work.micro_batch_tokens * sum(norm_widths(model)) / 2
    wide = layers * work.micro_batch_tokens * model.feed_forward_networks * model.intermediate_size / work.sizes.tensor
    scores, logits = layers * work.scores, micro * work.logits
    hidden_ops = hidden * 2 * (NORM_OPS + passes * (HASH_OPS + MASK_OPS) * (model.hidden_dropout > 0))
    if model.attention in FUSED_ATTENTION:
        forward, backward = (one + HASH_OPS * (model.attention_dropout > 0) for one in KERNEL_OPS)
        of_scores = 0.0, scores * ((passes - 1) * forward + backward)
    else:
        score_ops = SOFTMAX_OPS + passes * (HASH_OPS + MASK_OPS) * (model.attention_dropout > 0)
        of_scores = scores * SCORE_ACCESSES * work.bytes_per_activation, scores * score_ops
    per_micro_batch = WEIGHT_BYTES + (ACCUMULATE_BYTES if micro > 1 else 0.0)
    return {
        "hidden": (
            hidden * HIDDEN_ACCESSES * work.bytes_per_activation,
            hidden_ops + wide * ACTIVATION_OPS[model.activation],
        ),
        "scores": of_scores,
        "logits": (logits * LOGIT_BYTES, logits * SOFTMAX_OPS),
        "parameters": (micro * per_micro_batch * parameters.whole + work.update.step_bytes, 0.0),
    }


def expected_bytes_sent(work: Workload) -> BytesSent:
    """Bytes that the step must send, computed from its shapes."""
    sizes, parameters, model = work.sizes, work.parameters, work.model
    inside = sizes.data // sizes.slices
    copied = parameters.whole - parameters.gathered
    gradient = work.bytes_per_gradient
    per_device = gradient * (parameters.gathered / sizes.fsdp + copied)
    sub_layers = (1 + model.feed_forward_networks) / 2  # relative to attention and one feed-forward network
    width = model.layer_width * work.bytes_per_activation
    layers = ALL_REDUCES[model.remat] * sub_layers * model.num_layers * work.micro_batch_tokens * width
    # A split table: each device looks up its own rows, and the sum over devices is the embedding of every token; the
    # backward pass of the decoded positions does the same.
    tables = 4 * (model.embedding_width * work.micro_batch_tokens + model.decoder_width * work.rows * work.predictions)
    table_is_split = even_shard_size(model.vocab_size, sizes.tensor) < model.vocab_size
    return {
        "data": 2 * _remote_share(inside) * per_device,
        "fsdp": _remote_share(sizes.fsdp)
        * (parameters.gathered_bytes + gradient * parameters.gathered + 2 * gradient * copied),
        "tensor": 2 * _remote_share(sizes.tensor) * (layers + tables * table_is_split) * work.micro_batches,
        "network": 2 * _remote_share(sizes.slices) * per_device / inside,
    }


def _remote_share(devices: int) -> float:
    """Share of an array that is on other devices."""
    return (devices - 1) / devices


def link_seconds(sent: BytesSent, sizes: Sizes, chip: Chip) -> dict[str, float]:
    """Seconds for each axis, and for the network between slices, without overlap."""
    lengths = {"data": sizes.data // sizes.slices, "fsdp": sizes.fsdp, "tensor": sizes.tensor}
    devices = math.prod(lengths.values())
    seconds = {axis: sent[axis] / axis_bandwidth(chip, length, devices) for axis, length in lengths.items()}
    return seconds | {"network": sent["network"] / chip.network_bandwidth}


def axis_bandwidth(chip: Chip, length: int, devices: int) -> float:
    """Bytes/s that each device sends in a collective over `length` neighbours, in a slice of `devices` devices.

    The slice is assumed to be a cube; an axis longer than its side spans several dimensions and uses the links of all
    of them. A dimension too short for a closed ring is a line, whose ends have one link: half the bandwidth.
    """
    if not chip.torus_dimensions:
        return chip.link_bandwidth
    side = max(2.0, devices ** (1 / chip.torus_dimensions))
    dimensions = min(chip.torus_dimensions, max(1, math.ceil(math.log(max(2, length)) / math.log(side) - 1e-9)))
    closed = length ** (1 / dimensions) >= chip.ring_size - 1e-9
    return 2 * dimensions * chip.link_bandwidth * (1.0 if closed else 0.5)
