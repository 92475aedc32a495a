"""Model configs, one function per model family."""

from typing import Any

from bert_jax.config import ModelConfig


def bert(num_layers: int, hidden_size: int, *, vocab_size: int = 30522, **changes: Any) -> ModelConfig:
    """BERT in any size: heads of 64, feed-forward four times the width (Devlin et al. 2019; Turc et al. 2019).

    Args:
      num_layers: number of layers.
      hidden_size: width of the layers.
      vocab_size: rows of the embedding table.
      **changes: other fields of ModelConfig.
    """
    shape = {"num_heads": hidden_size // 64, "intermediate_size": 4 * hidden_size} | changes
    return ModelConfig(vocab_size=vocab_size, num_layers=num_layers, hidden_size=hidden_size, **shape)


def roberta(num_layers: int, hidden_size: int, *, vocab_size: int = 50265) -> ModelConfig:
    """RoBERTa: BERT with one token type and PyTorch's default LayerNorm epsilon (facebookresearch/fairseq).

    Its position table has 514 rows for 512 positions (`ModelConfig.position_offset`).
    """
    changes = {"position_offset": 2, "type_vocab_size": 1, "norm_epsilon": 1e-5}
    return bert(num_layers, hidden_size, vocab_size=vocab_size, **changes)


def albert(num_layers: int, hidden_size: int, num_heads: int, *, vocab_size: int = 30000) -> ModelConfig:
    """ALBERT: all layers share parameters, embeddings of width 128 (Lan et al. 2020, sections 3.1 and 4.1).

    No dropout, as in its second release; the tanh approximation of GELU (google-research/albert modeling.py).
    """
    return bert(
        num_layers,
        hidden_size,
        vocab_size=vocab_size,
        num_heads=num_heads,
        embedding_size=128,
        parameter_groups=1,
        activation="gelu_tanh",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def modern(
    num_layers: int, hidden_size: int, intermediate_size: int, *, max_positions: int, vocab_size: int = 50368
) -> ModelConfig:
    """ModernBERT: pre-norm, rotary positions, GEGLU, no biases, two of three layers local (Warner et al. 2024).

    Args:
      num_layers: number of layers.
      hidden_size: width of the layers; heads are 64 wide.
      intermediate_size: width of `gate` and of `up`.
      max_positions: maximum row length in tokens; it adds no parameters.
      vocab_size: rows of the embedding table.
    """
    return bert(
        num_layers,
        hidden_size,
        vocab_size=vocab_size,
        intermediate_size=intermediate_size,
        max_positions=max_positions,
        type_vocab_size=0,
        feed_forward="gated",
        biases="none",
        norm_epsilon=1e-5,
        norm_placement="pre",
        positions="rotary",
        attention_window=64,
        global_every=3,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def mobilebert_layers(hidden_size: int) -> dict[str, Any]:
    """The settings of MobileBERT's layers in a residual stream of any width H (Sun et al. 2020, table 1).

    Bottlenecks of H / 4, four feed-forward networks of width H, NoNorm, relu.
    """
    return {
        "bottleneck_size": hidden_size // 4,
        "bottleneck_attention": "shared",
        "intermediate_size": hidden_size,
        "feed_forward_networks": 4,
        "feed_forward": "plain",
        "activation": "relu",
        "norm": "none",
        "head_size": None,
    }


def mobilebert(*, num_layers: int = 24, vocab_size: int = 30522, **changes: Any) -> ModelConfig:
    """MobileBERT: layers of width 128 in a residual stream of width 512 (Sun et al. 2020, table 1; 25 million
    parameters; google-research/mobilebert uncased_L-24_H-128_B-512_A-4_F-4_OPT.json).

    Args:
      num_layers: number of layers.
      vocab_size: rows of the embedding table.
      **changes: other fields of ModelConfig.
    """
    shape = {
        "num_heads": 4,
        "embedding_size": 128,
        "embeddings": "trigrams",
        "hidden_dropout": 0.0,
    }
    return bert(num_layers, 512, vocab_size=vocab_size, **mobilebert_layers(512) | shape | changes)


def ib_bert(*, num_layers: int = 24, vocab_size: int = 30522, **changes: Any) -> ModelConfig:
    """IB-BERT, the teacher of MobileBERT: layers of width 1024 in a residual stream of width 512 (Sun et al. 2020,
    table 1; google-research/mobilebert uncased_L-24_H-1024_B-512_A-4.json).

    Args:
      num_layers: number of layers.
      vocab_size: rows of the embedding table.
      **changes: other fields of ModelConfig.
    """
    shape = {
        "num_heads": 4,
        "intermediate_size": 4096,
        "embedding_size": 128,
        "embeddings": "trigrams",
        "bottleneck_size": 1024,
        "bottleneck_attention": "input",
        "activation": "gelu_tanh",
    }
    return bert(num_layers, 512, vocab_size=vocab_size, **shape | changes)
