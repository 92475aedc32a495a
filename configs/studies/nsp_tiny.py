"""No pair objective, next-sentence prediction or sentence order: minutes on two CPU cores.

Papers: Devlin et al. 2019, section 5.1; Liu et al. 2019 (RoBERTa), section 4.2; Lan et al. 2020 (ALBERT), section
4.6.
Question: does a pair objective change the MLM loss of a small model on a small corpus?
Published: with fine-tuned scores of BERT-base, Devlin et al. lose without NSP, and Liu et al. gain slightly. MLM
losses of equal rows are not published.
Command: bert-jax ablate nsp_tiny --corpus DIR --workdir DIR
Size: 10,000 steps of 16 rows of 64 tokens, 10.2 million tokens in a run: 20 epochs of a corpus of 0.5 million tokens,
with a vocabulary of about 4,000. Hold out at least 35,000 tokens, for 512 rows.
Margin: 0.05 nats, stated before any run. The accuracies of the pair objectives are shown; each has one level only.
Cost: 9 runs, 92 million tokens; 11 to 15 minutes a run on one core, 65 minutes in two parts with one core each.
Result: none 4.024, nsp 4.964 (undecided: +0.939, t interval +0.171 to +1.708, p 0.069 after Holm), sop 4.428
(undecided: +0.404, t interval -0.005 to +0.813), on 29 books with 0.47 million tokens for training; the loss is higher
in every seed of both: docs/log/analysis.md, 2026-11-23, and docs/studies/nsp_tiny.html.
Fair rows: the losses are of full_sentences, contiguous text of one segment, which no level trains on. In the training
rows, none and nsp have the same text, with a random second segment in half of the examples; those of sop are
contiguous, in half of the examples in the other order. So nsp against none is the effect of the objective alone, and
sop against none that of the objective and of its rows. The study nsp separates them.
"""

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, EvaluationConfig, LogConfig, Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study

FINETUNING = {"steps": 400, "batch_size": 32, "learning_rate": 5e-4, "max_length": 64, "pooling": "mean"}


def study() -> Study:
    """Two levels of objective.pair, three seeds."""
    return Study(
        name="nsp_tiny",
        base=config_lib.replace(
            presets.load_config("bert_tiny"),
            phases=(Phase(steps=10_000, seq_len=64, batch_size=16, learning_rate=2e-3, warmup_steps=200),),
            checkpoint=CheckpointConfig(every=1000, keep=10),
            log=LogConfig(every=100, layers=False, tensorboard=False),
            evaluation=EvaluationConfig(every=2000, rows=512),
        ),
        factors={
            "pair": {
                "none": {"objective": {"pair": "none"}},
                "nsp": {"objective": {"pair": "nsp"}},
            }
        },
        margins={
            "mlm_loss": 0.05,
            "mlm_loss_area": 0.05,
            "mlm_tokens_to_loss": 1e6,
            "nsp_accuracy": 0.02,
            "sst2": 0.01,
            "stsb": 0.02,
        },
        tasks={"sst2": FINETUNING, "stsb": FINETUNING},
        rows=HeldOutRows("full_sentences", 64, 512),
    )
