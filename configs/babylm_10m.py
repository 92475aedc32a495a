"""GPT-BERT's recipe for 10 million words (BabyLM, strict-small), with masked tokens only.

Paper: Charpentier and Samuel 2024, "GPT or BERT: why not both?" (arXiv 2410.24159); ltgoslo/gpt-bert,
pretraining/train_10m.py and configs/small.json.
Command: bert-jax pretrain babylm_10m --corpus DIR --workdir DIR
Batch: 8,192 rows of 128 tokens at first, growing over the whole run to 32,768.
Expected: not run here. BabyLM 2025's page gives 70.4 on its filtered BLiMP for GPT-BERT with mostly masked tokens
(other text, objective and positions, so no score to reach).
Parameters: 27,928,320 of the encoder, 28,084,352 with the MLM head (vocabulary of 8,192).
From the original: depth, width, heads, gated feed-forward of 1,280, dropout, rows, batch, 7,812 steps, LAMB with its
rate, betas, epsilon, weight decay and clipping, warmup over 1.6 %, a cosine to a tenth, cooldown over 1.6 %, mask rate
30 to 15 %, z-loss, average of the parameters.
Differences: GPT-BERT trains 1 of 16 rows on the next token and predicts each masked token at the position before it;
here all are masked and predicted in place. Rotary positions instead of 32 relative buckets; pre-norm without its second
norm, attention gates and weights of earlier layers. Its rows grow to 256 tokens after 70 % and 512 after 90 % of the
steps. The batch grows in four steps instead of smoothly, the mask rate is 15 % before the cooldown, and the average of
the parameters warms up.
"""

import dataclasses

from bert_jax.config import Config, DataConfig, EvaluationConfig, ObjectiveConfig, OptimizerConfig, Phase
from bert_jax.model import families


def config() -> Config:
    """GPT-BERT small, masked tokens only."""
    steps, cooldown, rate = 7812, 124, 1.41e-2
    model = families.modern(num_layers=12, hidden_size=384, intermediate_size=1280, max_positions=512, vocab_size=8192)
    return Config(
        name="babylm_10m",
        model=dataclasses.replace(
            model,
            attention_window=None,
            global_every=1,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            compute_dtype="bfloat16",
        ),
        objective=ObjectiveConfig(pair="none", mask_rate=0.3, z_loss=1e-4),
        data=DataConfig(format="doc_sentences", example_end="row"),
        optimizer=OptimizerConfig(
            name="lamb", beta1=0.9, beta2=0.98, epsilon=1e-8, weight_decay=0.1, clip_norm=2.0, ema_decay=0.999
        ),
        phases=(
            Phase(
                steps=steps - cooldown,
                seq_len=128,
                batch_size=32_768,
                start_batch_size=8192,
                ramp_steps=steps - cooldown,
                learning_rate=rate,
                warmup_steps=124,
                decay="cosine",
                decay_start=124,
                end_learning_rate=rate / 10,
                end_mask_rate=0.15,
            ),
            Phase(
                steps=cooldown,
                seq_len=128,
                batch_size=32_768,
                learning_rate=rate / 10,
                warmup_steps=0,
                mask_rate=0.15,
            ),
        ),
        evaluation=EvaluationConfig(batch_size=512),
    )
