"""BERT-large in 8,601 steps: LAMB with batches of 65,536 and 32,768 rows, as in NVIDIA's recipe.

Recipe: NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT (pretrain_config.sh, schedulers.py, README), after
You et al. 2020, "Large Batch Optimization for Deep Learning".
Command: bert-jax pretrain bert_large_lamb --corpus DIR --workdir DIR
Batch: 65,536 rows of 128 tokens for 7,038 steps, then 32,768 rows of 512 for 1,563.
Expected: final loss 1.265 with standard deviation 0.023 over 5 seeds; SQuAD 1.1 F1 90.68 with 0.16 over 10, by the
README; not run here.
Parameters: 335,141,888 with encoder and pooler, 336,226,108 with both heads (vocabulary of 30,522).
Differences from the recipe: masks are new in every epoch (NVIDIA: five copies on disk), short examples share rows,
bfloat16 instead of float16, the vocabulary is not padded to 30,528, and the learning rate of a step is NVIDIA's of the
step before.
"""

import dataclasses

from bert_jax.config import Config, EvaluationConfig, OptimizerConfig, Phase
from bert_jax.model import families


def config() -> Config:
    """BERT-large with NVIDIA's LAMB."""
    return Config(
        name="bert_large_lamb",
        model=dataclasses.replace(families.bert(num_layers=24, hidden_size=1024), compute_dtype="bfloat16"),
        optimizer=OptimizerConfig(name="lamb", lamb_flavour="nvidia", weight_decay=0.01),
        # (1 - t)^0.5 with t over all steps of a phase: at the end of the warmup the decay has already begun.
        phases=(
            Phase(
                steps=7038,
                seq_len=128,
                batch_size=65_536,
                learning_rate=6e-3,
                warmup_steps=2001,  # 0.2843 of the steps, rounded up
                decay_power=0.5,
                max_predictions=20,
            ),
            # Moments are kept; the step count for bias correction is reset.
            Phase(
                steps=1563,
                seq_len=512,
                batch_size=32_768,
                learning_rate=4e-3,
                warmup_steps=201,  # 0.128 of them, rounded up
                decay_power=0.5,
                max_predictions=80,
                step_count="reset",
            ),
        ),
        evaluation=EvaluationConfig(batch_size=256),
    )
