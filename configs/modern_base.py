"""ModernBERT-base's shape with a tenth of its tokens: pre-norm, rotary, GEGLU, no biases, local and global attention.

Paper: Warner et al. 2024, "Smarter, Better, Faster, Longer" (arXiv 2412.13663); AnswerDotAI/ModernBERT,
modernbert-base-pretrain.yaml; in its line from Portes et al. 2023, "MosaicBERT" (arXiv 2312.17482).
Command: bert-jax pretrain modern_base --corpus DIR --workdir DIR
The vocabulary is 50,368, a multiple of 64; ModernBERT's is a byte-level BPE for text and code.
Batch: 768 rows of 1,024 tokens at first, 4,608 after 1,818 steps (5 billion tokens), 37,200 steps in all: 172
billion tokens.
Expected: no score is published for this length; not run here.
Parameters: 149,015,040 of the encoder, 149,656,000 with the MLM head.
From the original: shape, 30 % of the tokens masked, 1,024 tokens a row, peak 8e-4 after 3 billion tokens of warmup,
StableAdamW without clipping by the global norm, betas, epsilon, batch and its ramp from 768 rows.
Smaller: 172 billion tokens instead of 1,719, and a ramp over 5 billion instead of 50. ModernBERT's stage at 8,192
tokens (300 billion more) is omitted.
Other differences: ModernBERT's learning rate decays only in a last stage at 8,192 tokens; here it decays in the last
tenth, by the same 1 - sqrt. ModernBERT's weight decay of 1e-5 is not multiplied by the learning rate, only by its share
of the peak, so it is 1e-5 / 8e-4 here. No dropout (ModernBERT: 0.1 on the attention's output).
Initial weights are BERT's, not Megatron's, which shrink with depth. The first layer's norm exists but is not used:
768 parameters more than in the release.
"""

import dataclasses

from bert_jax.config import Config, DataConfig, EvaluationConfig, ObjectiveConfig, OptimizerConfig, Phase
from bert_jax.model import families


def config() -> Config:
    """ModernBERT-base on 172 billion tokens."""
    return Config(
        name="modern_base",
        model=dataclasses.replace(
            families.modern(num_layers=22, hidden_size=768, intermediate_size=1152, max_positions=1024),
            compute_dtype="bfloat16",
        ),
        objective=ObjectiveConfig(pair="none", mask_rate=0.3),
        data=DataConfig(format="doc_sentences", example_end="row"),
        optimizer=OptimizerConfig(
            name="stable_adamw", beta1=0.9, beta2=0.98, epsilon=1e-6, weight_decay=1e-5 / 8e-4, clip_norm=None
        ),
        phases=(
            Phase(
                steps=37_200,
                seq_len=1024,
                batch_size=4608,
                start_batch_size=768,
                ramp_steps=1818,
                learning_rate=8e-4,
                warmup_steps=1369,  # 3 billion tokens, all of them within the ramp
                decay="sqrt",
                decay_start=33_480,
            ),
        ),
        evaluation=EvaluationConfig(batch_size=256),
    )
