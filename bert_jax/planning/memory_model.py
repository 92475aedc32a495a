"""How many bytes an update needs on each device, by kind: arithmetic for a search, before anything is compiled.

| kind | bytes |
|---|---|
| parameters, moments | 4 and 8 per parameter that the device owns |
| gradients | 4 per parameter that it computes with, and 4 more of the word table, which is looked up and decodes; 4 more per parameter while micro-batches are summed up; 4 per owned parameter more where they are scattered over fsdp |
| gathered | 4 per parameter that is gathered over fsdp, for the whole update |
| casts | in bfloat16: 2 per parameter for the copy that products read, and 2 per layer parameter for gradients before they become float32 |
| activations | what each layer keeps for the backward pass, by `model.remat`, times layers |
| temporaries | `WORKING` times what one layer would keep without remat, and `LOGIT_BYTES` per logit |
| batch | rows of an update, int32 |

What a layer keeps was counted in the code of model/encoder.py and agrees with programs that XLA compiled (docs/LOG.md).
Fragmentation, padding to tiles and what compilers recompute of themselves are not in it.
"""  # noqa: E501

from bert_jax.chips import Sizes
from bert_jax.config import Config, ModelConfig
from bert_jax.planning.workload import Workload, split, workload
from bert_jax.training.micro_batch import MEMORY_SHARE, valid_accumulations

WORKING = 0.75
"""Of what one layer would keep: its gradients while the backward pass is there. Fitted (docs/LOG.md)."""
LOGIT_BYTES = 8
"""Per logit: itself and its gradient, float32."""
BATCH_ARRAYS = 6
"""Of a batch that are as long as the row, int32: ids, types, segments, positions, masked ids, and masking's scratch."""
KEEP_BYTES = 1
"""Per element that passes dropout: a boolean."""


def estimate(config: Config, phase: int, sizes: Sizes, accumulation: int) -> dict[str, int]:
    """Bytes per device by kind, for an update of a phase at its full batch size; their sum must fit.

    Args:
      config: of the run.
      phase: index.
      sizes: of the mesh.
      accumulation: micro-batches per update.

    Raises:
      UserError: rows or heads cannot be divided so.
    """
    work = workload(config, phase, sizes, accumulation)
    model, parameters = work.model, work.parameters
    low = work.activation_bytes == 2
    over_fsdp, several = sizes.fsdp > 1, accumulation > 1
    table = split(model.vocab_size, sizes.tensor) * model.embedding_width
    layer = layer_bytes(work)
    kept = {
        "none": layer,
        "dots": (_carry(work) + _products(work)) * work.activation_bytes,
        "full": _carry(work) * work.activation_bytes,
    }[model.remat]
    return {
        "parameters": 4 * parameters.owned,
        "moments": 8 * parameters.owned,
        "gradients": 4 * (parameters.whole * (1 + several) + parameters.owned * over_fsdp + table),
        "gathered": 4 * parameters.gathered,
        "casts": 2 * low * (parameters.whole + _layer_parameters(work)),
        "activations": model.num_layers * kept,
        "temporaries": int(WORKING * layer) + LOGIT_BYTES * work.logits,
        "batch": 4 * BATCH_ARRAYS * work.tokens * accumulation,
    }


def fewest_that_fit(config: Config, phase: int, sizes: Sizes, available: float) -> int | None:
    """The fewest micro-batches whose estimate fits into `MEMORY_SHARE` of device memory; None: single rows do not fit.

    Args:
      config: of the run.
      phase: index.
      sizes: of the mesh.
      available: bytes of each device.
    """
    choices = valid_accumulations(config.phases[phase], sizes.row_shards)
    fitting = (n for n in choices if sum(estimate(config, phase, sizes, n).values()) <= MEMORY_SHARE * available)
    return next(fitting, None)


def layer_bytes(work: Workload) -> int:
    """What one layer keeps for its backward pass if nothing is recomputed, in a micro-batch on one device.

    In activations: its input, query, key and value, context, what goes into the feed-forward layer, and there what
    stands before and behind the activation. In float32: centred and normalised input of both norms. Of attention:
    probabilities in float32, and behind dropout as an activation. Of dropouts: which elements stay.
    """
    model, size = work.model, work.activation_bytes
    width = work.tokens * model.hidden_size
    wide = work.tokens * split(model.intermediate_size, work.sizes.tensor)
    inner = work.tokens * work.heads * model.size_per_head
    gates = 2 if model.feed_forward == "gated" else 1
    activations = size * (2 * width + 4 * inner + (1 + gates) * wide)
    norms = 2 * 2 * 4 * width
    stays = KEEP_BYTES * 2 * width * (model.hidden_dropout > 0)
    if model.attention == "cudnn":
        return activations + norms + stays
    dropped = model.attention_dropout > 0
    return activations + norms + stays + work.scores * (4 + size + KEEP_BYTES * dropped)


def _carry(work: Workload) -> int:
    """Elements of a layer's input."""
    return work.tokens * work.model.hidden_size


def _products(work: Workload) -> int:
    """Elements of the outputs of a layer's products with weights: what remat "dots" keeps."""
    model = work.model
    rises = 2 if model.feed_forward == "gated" else 1
    inner, wide = work.heads * model.size_per_head, split(model.intermediate_size, work.sizes.tensor)
    return work.tokens * (3 * inner + 2 * model.hidden_size + rises * wide)


def _layer_parameters(work: Workload) -> int:
    """Kernels of all layers, on one device."""
    model: ModelConfig = work.model
    products = 3 if model.feed_forward == "gated" else 2
    inner, wide = work.heads * model.size_per_head, split(model.intermediate_size, work.sizes.tensor)
    groups = model.parameter_groups or model.num_layers
    return groups * model.hidden_size * (4 * inner + products * wide)
