"""BERT-large as in MLPerf Training: from a given checkpoint to a masked-token accuracy of 72 %.

Recipe: mlcommons/training, retired_benchmarks/bert (README, the command for TPUv3-128; optimization.py).
Command: bert-jax pretrain bert_large_mlperf --corpus DIR --workdir DIR --start.source MODEL
MODEL is the benchmark's checkpoint, model.ckpt-28252, in a format that start.source reads. It is not set here: without
it the run starts from random parameters, which do not reach the target in 600 steps.
Batch: 8,192 rows of 512 tokens, at most 600 steps, an evaluation after every 225,000 rows.
Expected: masked-token accuracy 0.34085 at the start and 0.720 before the end, by the README; not run here.
Parameters: 335,141,888 with encoder and pooler, 336,226,108 with both heads (vocabulary of 30,522).
Differences from the benchmark: the held-out rows are 10,000 of the corpus's own validation split (MLPerf: a file of
10,000 samples made with seed 12345), so the accuracies are close but not equal; gradients are clipped after they are
summed over the devices (MLPerf: before).
"""

import dataclasses

from bert_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    OptimizerConfig,
    Phase,
    TargetConfig,
)
from bert_jax.model import families


def config() -> Config:
    """BERT-large for MLPerf's target."""
    return Config(
        name="bert_large_mlperf",
        # The checkpoint was trained with google-research's GELU.
        model=dataclasses.replace(
            families.bert(num_layers=24, hidden_size=1024), activation="gelu_tanh", compute_dtype="bfloat16"
        ),
        # Ten copies of the corpus with masks of their own, and a sample is a row.
        data=DataConfig(example_copies=10, mask_copies=10, examples_per_row=1),
        # Bias correction, and no trust ratio for biases and norms, as in NVIDIA's flavour (lamb_optimizer_v1.py).
        optimizer=OptimizerConfig(
            name="lamb", lamb_flavour="nvidia", beta1=0.88, beta2=0.88, epsilon=1e-6, weight_decay=0.0166629
        ),
        phases=(
            Phase(
                steps=600,
                seq_len=512,
                batch_size=8192,
                learning_rate=0.00288293,
                warmup_steps=211,  # num_warmup_steps 287, of which 76 are done (start_warmup_step -76)
                warmup_done=76,
                max_predictions=76,
            ),
        ),
        checkpoint=CheckpointConfig(every=100),
        log=LogConfig(every=10),
        evaluation=EvaluationConfig(every=0, rows=10_000, batch_size=256),
        target=TargetConfig(mlm_accuracy=0.72),
    )
