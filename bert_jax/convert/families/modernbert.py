"""ModernBERT (transformers modeling_modernbert.py; Warner et al. 2024)."""

from collections.abc import Mapping
from typing import Any

from bert_jax.config import ModelConfig, TaskHead
from bert_jax.convert.families.family import (
    ACTIVATION_NAMES,
    SPAN_LABELS,
    Family,
    HuggingFaceConfig,
    describe_labels,
)
from bert_jax.convert.name_map import Entry, Layout, dense, norm, same_layout
from bert_jax.convert.tensors import LazyTensor
from bert_jax.errors import UserError, require
from bert_jax.model.heads import Heads

TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
GLOBAL_BASE, LOCAL_BASE = 160_000.0, 10_000.0


def _mlm_activation(settings: HuggingFaceConfig) -> str:
    return settings.activation("classifier_activation")


def _read_task(settings: HuggingFaceConfig, tensors: Mapping[str, LazyTensor], pooler: bool) -> TaskHead | None:
    parts = {"activation": _mlm_activation(settings), "norm": True}
    if settings.architecture.endswith("ForTokenClassification"):
        return settings.find_task_head(tensors, "classifier", "tagging", "tokens", **parts)
    if settings.architecture.endswith("ForQuestionAnswering"):
        return TaskHead("span", SPAN_LABELS, "tokens", **parts) if "classifier.weight" in tensors else None
    pooling = settings.get("classifier_pooling", "cls")
    require(
        pooling in ("cls", "mean"), f"{settings.source}: classifier_pooling is '{pooling}': only cls and mean are known"
    )
    return settings.find_task_head(tensors, "classifier", "classification", pooling, **parts)


def _global_every(settings: HuggingFaceConfig) -> int:
    """Every n-th layer has global attention; 1: all layers.

    Raises:
      UserError: global layers are not evenly spaced, or the first layer is local.
    """
    kinds = settings.get("layer_types")
    if kinds is None:
        return settings.get("global_attn_every_n_layers", 3)
    is_global, num_layers = [kind == "full_attention" for kind in kinds], settings.required_size("num_hidden_layers")
    for global_every in range(1, len(kinds) + 1) if len(kinds) == num_layers else ():
        if is_global == [layer % global_every == 0 for layer in range(num_layers)]:
            return global_every
    raise UserError(
        f"{settings.source}: layer_types must give each of {num_layers} layers, the first and then every n-th global"
    )


def _rotary_base(settings: HuggingFaceConfig, kind: str, legacy_name: str, default: float) -> float:
    """From the config of transformers 5 (rope_parameters) or 4 (legacy_name)."""
    rope = settings.get("rope_parameters", {}).get(kind) or {}
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"{settings.source}: rope_parameters.{kind} '{rope['rope_type']}': only 'default' can be read")
    return float(rope.get("rope_theta") or settings.get(legacy_name, default))


def _read_config(settings: HuggingFaceConfig) -> ModelConfig:
    for name in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"):
        settings.require_value(name, False, "only models without biases, except in output layers, can be read")
    settings.require_value("decoder_bias", True, "only decoders with a bias can be read")
    global_every = _global_every(settings)
    return settings.model(
        vocab_size=settings.required_size("vocab_size"),
        hidden_size=settings.required_size("hidden_size"),
        num_layers=settings.required_size("num_hidden_layers"),
        num_heads=settings.required_size("num_attention_heads"),
        intermediate_size=settings.required_size("intermediate_size"),
        max_positions=settings.required_size("max_position_embeddings"),
        type_vocab_size=0,
        activation=settings.activation("hidden_activation"),
        feed_forward="gated",
        biases="none",
        norm_epsilon=settings.get("norm_eps", 1e-5),
        initializer_range=settings.get("initializer_range", 0.02),
        hidden_dropout=settings.get("mlp_dropout", 0.0),
        attention_dropout=settings.get("attention_dropout", 0.0),
        positions="rotary",
        rotary_base=_rotary_base(settings, "full_attention", "global_rope_theta", GLOBAL_BASE),
        local_rotary_base=_rotary_base(settings, "sliding_attention", "local_rope_theta", LOCAL_BASE),
        norm_placement="pre",
        attention_window=None if global_every == 1 else settings.get("local_attention", 128) // 2,
        global_every=global_every,
    )


def _write_config(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    window = config.attention_window
    head = heads.task.activation if heads.task else heads.mlm_activation or config.activation
    hf_config = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "hidden_activation": ACTIVATION_NAMES[config.activation],
        "classifier_activation": ACTIVATION_NAMES[head],
        "classifier_pooling": "mean" if heads.task and heads.task.reads == "mean" else "cls",
        "norm_eps": config.norm_epsilon,
        "initializer_range": config.initializer_range,
        "embedding_dropout": config.hidden_dropout,
        "mlp_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "global_rope_theta": config.rotary_base,
        "local_rope_theta": config.local_rotary_base,
        "local_attention": 128 if window is None else 2 * window,
        "global_attn_every_n_layers": 1 if window is None else config.global_every,
        "tie_word_embeddings": True,
        # The defaults exceed smaller vocabularies; conversion.py sets the ids of the tokenizer.
        **dict.fromkeys(TOKEN_IDS),
    }
    return hf_config | describe_labels(heads)


_LAYER = "model.layers.{n}"
_MLP_IN = [
    Entry(f"{_LAYER}.mlp.Wi.weight", f"encoder/layers/{name}/kernel", Layout.KERNEL, block=(half, 2))
    for half, name in enumerate(("gate", "up"))
]
_TASK = (
    *dense("head.dense", "task/dense", bias=False),
    *norm("head.norm", "task/norm", bias=False),
    *dense("classifier", "task/output"),
)
MODERNBERT = Family(
    model_type="modernbert",
    base="model",
    names=(
        *same_layout("model.embeddings.tok_embeddings.weight", "encoder/embeddings/word"),
        *norm("model.embeddings.norm", "encoder/embeddings/norm", bias=False),
        *norm(f"{_LAYER}.attn_norm", "encoder/layers/attention_norm", bias=False, first=1),
        *dense(f"{_LAYER}.attn.Wqkv", "encoder/layers/qkv", bias=False),
        *dense(f"{_LAYER}.attn.Wo", "encoder/layers/attention_out", bias=False, merging=True),
        *norm(f"{_LAYER}.mlp_norm", "encoder/layers/feed_forward_norm", bias=False),
        *_MLP_IN,
        *dense(f"{_LAYER}.mlp.Wo", "encoder/layers/down", bias=False),
        *norm("model.final_norm", "encoder/final_norm", bias=False),
        *dense("head.dense", "mlm/transform", bias=False),
        *norm("head.norm", "mlm/norm", bias=False),
        *same_layout("decoder.bias", "mlm/bias"),
    ),
    tasks=dict.fromkeys(("classification", "multilabel", "multiple_choice", "tagging", "span"), _TASK),
    decoder="decoder",
    read_config=_read_config,
    write_config=_write_config,
    read_task=_read_task,
    mlm_activation=_mlm_activation,
    class_prefix="ModernBert",
    sequence_head={"reads": "cls", "activation": "gelu", "norm": True},
    token_head={"activation": "gelu", "norm": True},
    defaults={"hidden_activation": "gelu"},
    buffers=(r"layers\.\d+\.attn\.rotary_emb\.inv_freq",),
    unused_params={"encoder/layers/attention_norm/scale": 1.0},
)
