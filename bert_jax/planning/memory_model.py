"""Estimated bytes of a step on each device, by kind: arithmetic, without compilation.

| kind | bytes |
|---|---|
| parameters, moments | 4, and 4 for each of the optimizer's moments, per parameter in the device's shard |
| gradients | 4 per gathered or replicated parameter, and 4 more per element of the word table, which is used for lookup and decoding, with other columns of the decoder; with several micro-batches, 4 more per parameter for the sum; with fsdp, 4 more per parameter in the device's shard for the reduce-scatter |
| gathered | 4 per parameter that is gathered over fsdp, for the whole step |
| casts | in bfloat16: 2 per parameter for the copy that matrix products read, and 2 per layer parameter for gradients before the cast to float32; in float32: 4 per kernel of the layers, which a scan over all but the last copies |
| activations | saved by each layer for the backward pass, by `model.remat`, times layers; the last one computes only keys and values at positions that are not read |
| temporaries | `LAYER_WORKING_SHARE` times the activations of one layer without remat, and `LOGIT_BYTES` per logit |
| batch | rows of a step, int32 |

The activations of a layer were counted in the code of model/encoder.py and agree with compiled programs (docs/log/pods.md, 2026-11-21).
The model ignores activations of adapters, fragmentation, padding to tiles and recomputation that the compiler decides.
"""  # noqa: E501

from bert_jax.chips import MEMORY_SHARE, Sizes
from bert_jax.config import Config
from bert_jax.config.sections import FUSED_ATTENTION
from bert_jax.model.flops import layer_weights
from bert_jax.planning.workload import Workload, bottleneck_input_widths, even_shard_size, norm_widths, workload

LAYER_WORKING_SHARE = 0.75
"""Share of the activations of one layer: its gradients during the backward pass. Fitted (docs/log/pods.md,
2026-11-21)."""
LOGIT_BYTES = 8
"""Per logit: value and gradient, float32."""
BATCH_ARRAYS = 6
"""Arrays of a batch with the length of the row, int32: ids, types, segments, positions, masked ids, and scratch."""


def estimate_memory(config: Config, phase: int, sizes: Sizes, accumulation: int) -> dict[str, int]:
    """Bytes per device by kind, for a step of a phase at its full batch size; arguments and errors as `workload`."""
    work = workload(config, phase, sizes, accumulation)
    of_models = [_model_memory(one) for one in work.models]
    total = {kind: sum(one[kind] for one in of_models) for kind in of_models[0]}
    return total | {"batch": 4 * BATCH_ARRAYS * work.micro_batch_tokens * accumulation}


def _model_memory(work: Workload) -> dict[str, int]:
    """`estimate_memory` of one of the step's models, without the batch."""
    sizes, accumulation = work.sizes, work.micro_batches
    model, parameters, width = work.model, work.parameters, work.model.hidden_size
    is_bfloat16 = work.bytes_per_activation == 2
    over_fsdp, several = sizes.fsdp > 1, accumulation > 1
    table = even_shard_size(model.vocab_size, sizes.tensor) * model.decoder_width
    layers_stored = model.parameter_groups or model.num_layers
    kernels = layers_stored * sum(layer_weights(model, work.inner, work.wide))
    layer = _layer_bytes(work)
    # Outputs, which remat "dots" saves: as wide as the inputs of the norms, query, key and value, and feed-forward; and
    # with kernels for TPUs the context.
    projections = 4 if model.attention == "pallas_tpu" else 3
    products = projections * work.inner + sum(norm_widths(model))
    products += model.feed_forward_networks * work.up_projections * work.wide
    saved = {
        "none": layer,
        "dots": work.micro_batch_tokens * (width + products) * work.bytes_per_activation,
        "full": work.micro_batch_tokens * width * work.bytes_per_activation,
    }[model.remat]
    # The last layer saves its input everywhere, and computes keys and values from it.
    entries = 2 * sum(bottleneck_input_widths(model))
    kept = width if model.remat == "full" else width + entries + 2 * work.inner
    everywhere = (1 - work.last_layer_share) * work.micro_batch_tokens * kept * work.bytes_per_activation
    # A scan over the other layers copies their kernels; in bfloat16, that copy is the cast.
    is_copied = work.last_layer_share < 1 and not is_bfloat16
    return {
        "parameters": 4 * parameters.owned,
        "moments": 4 * work.update.moments,
        "gradients": 4 * (parameters.whole * (1 + several) + parameters.owned * over_fsdp + table),
        "gathered": 4 * parameters.gathered,
        "casts": 2 * is_bfloat16 * (parameters.whole + kernels) + 4 * is_copied * kernels,
        "activations": int(work.effective_num_layers * saved + everywhere),
        "temporaries": int(LAYER_WORKING_SHARE * layer) + LOGIT_BYTES * work.logits,
    }


def fewest_micro_batches_that_fit(config: Config, phase: int, sizes: Sizes, available: float) -> int | None:
    """Fewest micro-batches whose estimate fits into `MEMORY_SHARE` of device memory; None: single rows do not.

    Args:
      config: of the run.
      phase: index.
      sizes: of the mesh.
      available: bytes of each device.
    """
    choices = config.phases[phase].valid_accumulations(sizes.row_shards)
    fitting = (n for n in choices if sum(estimate_memory(config, phase, sizes, n).values()) <= MEMORY_SHARE * available)
    return next(fitting, None)


def _layer_bytes(work: Workload) -> int:
    """Bytes that one layer saves for its backward pass without remat, in a micro-batch on one device.

    In the compute type: the layer's input, query, key and value, context, input of each feed-forward network, and input
    and output of its activation function, input of all norms; with a bottleneck also what its projections return and
    read. Attention: probabilities in float32, and after dropout in the compute type. Dropouts: their masks, one byte
    per element.
    """
    model, size, width = work.model, work.bytes_per_activation, work.model.hidden_size
    networks = model.feed_forward_networks
    read = width + networks * model.layer_width + sum(bottleneck_input_widths(model))
    dropped = 2 * width
    if model.bottleneck_size is not None:
        read, dropped = read + model.layer_width, width
    activations = read + 4 * work.inner + networks * (1 + work.up_projections) * work.wide + sum(norm_widths(model))
    tokens = work.micro_batch_tokens
    activations, masks = size * tokens * activations, tokens * dropped * (model.hidden_dropout > 0)
    scores = 0 if model.attention in FUSED_ATTENTION else work.scores * (4 + size + (model.attention_dropout > 0))
    return activations + masks + scores
