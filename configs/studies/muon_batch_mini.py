"""AdamW, LAMB and Muon at batches of 256 and 2,048 rows: bert_mini on two CPU cores, a small form of `muon_batch`.

Papers: those of `muon_batch`.
Question: which optimizer reaches the lowest loss of a small masked LM at equal tokens, and does the batch matter?
Published: nothing for masked language models that is known to us.
Command: bert-jax ablate muon_batch_mini --corpus DIR --workdir DIR
Size: 20.97 million tokens in a run, rows of 32 tokens: 640 causal and 1,920 masked steps of 256 rows, or 80 and 240 of
2,048 rows; one seed.
Margin: 0.02 nats, stated before any run.
Cost: 9 runs, 189 million tokens; an estimate of 1.6 hours a run on one core.
Rates: the best of `muon_rates_mini` at 256 rows. At 2,048 rows that rate and, as in You et al., the square root of 8
times it; the better one counts.
Causal first: a masked model of this size stays at the unigram loss for millions of tokens (`schedules_mini`).
Other settings: 6 % warmup, one linear decay to 0 over both phases, weight decay 0.01, masks of 15 %, no dropout, no
pair objective, initial weights of 1 / sqrt(256).
"""

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, EvaluationConfig, LogConfig, Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study

OPTIMIZERS = {
    "adamw": ({"name": "adamw"}, 1e-3),
    "lamb": ({"name": "lamb", "lamb_flavour": "paper", "clip_norm": None}, 1e-2 / 3),
    "muon": ({"name": "muon"}, 9e-3),
}
"""Settings, and the learning rate at 256 rows."""
BATCHES = {"256": (256, 1.0), "2048": (2048, 8**0.5), "2048_same_rate": (2048, 1.0)}
"""Rows, and the factor of the learning rate."""


def phases(rate: float, batch_size: int) -> tuple[Phase, Phase]:
    """Causal, then masked, with one linear decay of the learning rate to 0."""
    steps, rows = 2560 * 256 // batch_size, {"seq_len": 32, "batch_size": batch_size, "accumulation": batch_size // 256}
    causal = Phase(
        steps=steps // 4,
        learning_rate=rate,
        end_learning_rate=0.75 * rate,
        warmup_steps=round(0.06 * steps),
        direction="causal",
        **rows,
    )
    return causal, Phase(steps=3 * steps // 4, learning_rate=0.75 * rate, warmup_steps=0, **rows)


def study() -> Study:
    """Three optimizers, two batches, one seed."""
    return Study(
        name="muon_batch_mini",
        base=config_lib.replace(
            presets.load_config("bert_mini"),
            model={
                "vocab_size": 8192,
                "attention": "auto",
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "initializer_range": 0.0625,
            },
            phases=phases(1e-3, 256),
            checkpoint=CheckpointConfig(every=80, every_minutes=3.0, keep=1),
            log=LogConfig(every=20, layers=False, tensorboard=False),
            evaluation=EvaluationConfig(every=80, rows=1024),
            objective={"pair": "none", "mask_rate": 0.15},
            data={"format": "doc_sentences", "example_end": "row"},
        ),
        factors={
            "recipe": {
                f"{name}_{level}": {"optimizer": optimizer, "phases": phases(rate * scale, batch_size)}
                for level, (batch_size, scale) in BATCHES.items()
                for name, (optimizer, rate) in OPTIMIZERS.items()
            }
        },
        margins={"mlm_loss": 0.02},
        rows=HeldOutRows("full_sentences", 32, 1024),
        seeds=1,
    )
