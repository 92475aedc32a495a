"""The encoder Ettin-17M: ModernBERT's architecture with 7 layers of width 256, and its three stages.

Paper: Weller et al. 2025, "Seq vs Seq: An Open Suite of Paired Encoders and Decoders" (arXiv 2507.11412);
JHU-CLSP/ettin-encoder-vs-decoder, pretraining/configs/standard/very_tiny: encoder_very_tiny.yaml (phase 0), then
de_decay (phase 1) and prolong_decay (phase 2).
Command: bert-jax pretrain ettin_17m --corpus DIR --workdir DIR
Batch: 144 rows of 1,024 tokens at first, 4,608 after 125 billion tokens; 1.7 trillion tokens. Then 250 and 50 billion
in rows of 8,192.
Expected: the paper's scores were not checked, and none is repeated; not run here. The authors' README gives 141 hours
on four H100s.
Parameters: 16,797,696 of the encoder, 16,913,856 with the MLM head (vocabulary of 50,368).
From the original: shape, mask rates 30, 30 and 15 %, learning rates, warmup over 4 billion tokens, decays by 1 - sqrt
to 1/2 and 1/25 of the peak, StableAdamW without clipping by the global norm, rotary bases (160,000 in global layers
from phase 1, in local layers from phase 2), batch and its ramp.
Differences: one corpus instead of one for each stage. Rows of 8,192 tokens instead of 7,999, which kernels divide into
blocks. Ettin's weight decay of 3e-4 is not multiplied by the learning rate, only by its share of the peak: 3e-4 / 3e-3
here, also in phase 2, whose peak is half of it. No dropout (Ettin: 0.1 on the attention's output). Initial weights are
BERT's, not Megatron's, which shrink with depth.
"""

import dataclasses

from bert_jax.config import Config, DataConfig, EvaluationConfig, ObjectiveConfig, OptimizerConfig, Phase
from bert_jax.model import families


def config() -> Config:
    """Ettin-17M."""
    long = Phase(steps=6623, seq_len=8192, batch_size=4608, warmup_steps=0, decay="sqrt")
    return Config(
        name="ettin_17m",
        model=dataclasses.replace(
            families.modern(num_layers=7, hidden_size=256, intermediate_size=384, max_positions=8192),
            rotary_base=160_000.0,
            local_rotary_base=160_000.0,
            compute_dtype="bfloat16",
        ),
        objective=ObjectiveConfig(pair="none", mask_rate=0.3),
        data=DataConfig(format="doc_sentences", example_end="row"),
        optimizer=OptimizerConfig(
            name="stable_adamw", beta1=0.9, beta2=0.98, epsilon=1e-6, weight_decay=3e-4 / 3e-3, clip_norm=None
        ),
        phases=(
            Phase(
                steps=385_163,
                seq_len=1024,
                batch_size=4608,
                start_batch_size=144,
                ramp_steps=51_377,
                learning_rate=3e-3,
                warmup_steps=8536,  # 4 billion tokens, all of them within the ramp
                decay="constant",
                rotary_base=10_000.0,
                local_rotary_base=10_000.0,
            ),
            dataclasses.replace(long, learning_rate=3e-3, end_learning_rate=1.5e-3, local_rotary_base=10_000.0),
            dataclasses.replace(
                long,
                steps=1325,
                learning_rate=1.5e-3,
                end_learning_rate=6e-5,
                mask_rate=0.15,
            ),
        ),
        evaluation=EvaluationConfig(batch_size=64),
    )
