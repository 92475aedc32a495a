"""The encoder Ettin-32M: ModernBERT's architecture with 10 layers of width 384, and its three stages.

Paper: Weller et al. 2025, "Seq vs Seq: An Open Suite of Paired Encoders and Decoders" (arXiv 2507.11412);
JHU-CLSP/ettin-encoder-vs-decoder, pretraining/configs/standard/tiny: encoder_tiny.yaml, then de_decay and
prolong_decay.
Command: bert-jax pretrain ettin_32m --corpus DIR --workdir DIR
Expected: the paper's scores were not checked, and none is repeated; not run here. The authors' README gives 212 hours
on four H100s.
Parameters: 31,883,520 of the encoder, 32,081,728 with the MLM head (vocabulary of 50,368).
The recipe is that of ettin_17m with its differences from the original, but for the batch ramp: 128 rows at first, 4,608
after 100 billion tokens.
"""

import dataclasses

from bert_jax.config import Config
from bert_jax.config.presets import load_config


def config() -> Config:
    """Ettin-32M."""
    smaller = load_config("ettin_17m")
    first = dataclasses.replace(
        smaller.phases[0], steps=380_324, start_batch_size=128, ramp_steps=41_240, warmup_steps=7796
    )
    return dataclasses.replace(
        smaller,
        name="ettin_32m",
        model=dataclasses.replace(smaller.model, num_layers=10, hidden_size=384, num_heads=6, intermediate_size=576),
        phases=(first, *smaller.phases[1:]),
    )
