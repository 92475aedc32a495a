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
