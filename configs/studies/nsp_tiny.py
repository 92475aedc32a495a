"""With and without next-sentence prediction: minutes on two CPU cores.

Papers: Devlin et al. 2019, section 5.1; Liu et al. 2019 (RoBERTa), section 4.2.
Question: does next-sentence prediction change the MLM loss of a small model on a small corpus, and its score on tasks?
Published: with fine-tuned scores of BERT-base, Devlin et al. lose without NSP, and Liu et al. gain slightly. MLM
losses of equal rows are not published.
Command: bert-jax ablate nsp_tiny --corpus DIR --workdir DIR --task-data DIR
Size: 10,000 steps of 16 rows of 64 tokens, 10.2 million tokens in a run: 20 epochs of a corpus of 0.5 million tokens,
with a vocabulary of about 4,000. Hold out at least 35,000 tokens, for 512 rows.
Margin: 0.05 nats, 1 point of accuracy, 0.02 of the correlations, stated before any run; those of the curve, 0.05 nats
and 1 million tokens, were stated when the runs had begun.
Cost: 6 runs, 61 million tokens, and 12 fine-tuning runs; 23 minutes a run on one core beside other work.
Result: MLM loss 3.937 without and 4.195 with NSP (higher: +0.258, t interval +0.189 to +0.326), over tokens +0.429 on
average; SST-2 73.2 and 72.2 (undecided: -1.0 points, -4.2 to +2.3); STS-B 0.158 and 0.181 (higher: +0.023, +0.012 to
+0.033), on 29 books with 0.47 million tokens for training: docs/log/analysis.md, 2026-11-28, and
docs/studies/nsp_tiny.html.
Fair rows: the losses are of full_sentences, contiguous text of one segment, which no level trains on. In the training
rows, both levels have the same text, with a random second segment in half of the examples. So nsp against none is the
effect of the objective alone. Sentence order, which needs other rows, is in the study nsp.
Tasks: SST-2 and STS-B; DIR has the folders sst2 and stsb. The heads read the mean over the tokens in both levels,
since only NSP trains BERT's pooler: a head on it would begin with a random pooler beside a trained one. One
fine-tuning seed for each of the three pretraining seeds.
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
