"""One function per family of models; each returns a model config."""

from bert_jax.config import ModelConfig


def bert(num_layers: int, hidden_size: int, *, vocab_size: int = 30522) -> ModelConfig:
    """BERT in any size: heads of 64, feed-forward four times the width (Devlin et al. 2019; Turc et al. 2019)."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
    )


def roberta(num_layers: int, hidden_size: int, *, vocab_size: int = 50265) -> ModelConfig:
    """RoBERTa: BERT's shapes with one token type and LayerNorms of PyTorch's epsilon (facebookresearch/fairseq).

    Its position table has 514 rows for 512 positions (`ModelConfig.position_offset`).
    """
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
        position_offset=2,
        type_vocab_size=1,
        norm_epsilon=1e-5,
    )


def albert(num_layers: int, hidden_size: int, num_heads: int, *, vocab_size: int = 30000) -> ModelConfig:
    """ALBERT: one set of layer parameters, embeddings of width 128 (Lan et al. 2020, sections 3.1 and 4.1).

    Without dropout, as its second release; GELU by tanh, as all of google-research's (albert modeling.py).
    """
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=4 * hidden_size,
        embedding_size=128,
        parameter_groups=1,
        activation="gelu_tanh",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def distilbert(num_layers: int, hidden_size: int, *, vocab_size: int = 30522) -> ModelConfig:
    """DistilBERT: BERT without token types; nor has it a pooler (Sanh et al. 2019, section 3)."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
        type_vocab_size=0,
    )


def electra(
    num_layers: int, hidden_size: int, num_heads: int, *, embedding_size: int | None, vocab_size: int = 30522
) -> ModelConfig:
    """ELECTRA's generator or discriminator: BERT, the small ones with narrower tables (Clark et al. 2020, appendix A).

    Args:
      num_layers: depth.
      hidden_size: width.
      num_heads: heads per layer.
      embedding_size: width of the tables, which both parts share; None: as wide as the layers, without projection.
      vocab_size: rows of the embedding table.
    """
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=4 * hidden_size,
        embedding_size=embedding_size,
    )


def modern(
    num_layers: int, hidden_size: int, intermediate_size: int, *, max_positions: int, vocab_size: int = 50368
) -> ModelConfig:
    """ModernBERT: pre-norm, rotary positions, GEGLU, no biases, two of three layers local (Warner et al. 2024).

    Args:
      num_layers: depth.
      hidden_size: width; heads of 64.
      intermediate_size: width of gate and values, each.
      max_positions: longest row, in tokens; it costs no parameters.
      vocab_size: rows of the embedding table.
    """
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=hidden_size // 64,
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
