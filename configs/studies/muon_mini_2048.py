"""AdamW, LAMB and Muon at a batch of 2,048 rows: bert_mini on two CPU cores, a small form of `muon_batch`.

Papers: those of `muon_batch`.
Question: which optimizer reaches the lowest loss of a small masked LM at equal tokens?
Published: nothing for masked language models that is known to us.
Command: bert-jax ablate muon_mini_2048 --corpus DIR --workdir DIR
Size: 20.19 million tokens in a run: 77 causal and 231 masked steps of 2,048 rows of 32 tokens; one seed.
Margin: 0.02 nats, stated before any run.
Cost: 3 runs, 61 million tokens; an estimate of 1.6 hours a run on one core.
Rates: the best of `muon_rates_mini` at 256 rows, whose runs had about as many steps (320). The square root of 8 times
as large ones (You et al.) are near those that did not train there.
Causal first: a masked model of this size stays at the unigram loss for millions of tokens (`schedules_mini`).
Other settings: those of `muon_mini_256`.
"""

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, EvaluationConfig, LogConfig, Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study

OPTIMIZERS = {
    "adamw": ({"name": "adamw"}, 1e-3),
    "lamb": ({"name": "lamb", "lamb_flavour": "paper", "clip_norm": None}, 1e-2 / 3),
    "muon": ({"name": "muon"}, 9e-3),
}
"""Settings and learning rate."""


def phases(rate: float) -> tuple[Phase, Phase]:
    """Causal, then masked, with one linear decay of the learning rate to 0."""
    rows, middle = {"seq_len": 32, "batch_size": 2048, "accumulation": 8}, 0.75 * rate
    causal = Phase(steps=77, learning_rate=rate, end_learning_rate=middle, warmup_steps=18, direction="causal", **rows)
    return causal, Phase(steps=231, learning_rate=middle, warmup_steps=0, **rows)


def study() -> Study:
    """Three optimizers, one seed."""
    return Study(
        name="muon_mini_2048",
        base=config_lib.replace(
            presets.load_config("bert_mini"),
            model={
                "vocab_size": 4096,
                "attention": "auto",
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "initializer_range": 0.0625,
            },
            phases=phases(1e-3),
            checkpoint=CheckpointConfig(every=77, every_minutes=5.0, keep=1),
            log=LogConfig(every=11, layers=False, tensorboard=False),
            evaluation=EvaluationConfig(every=22, rows=1024),
            objective={"pair": "none", "mask_rate": 0.15},
            data={"format": "doc_sentences", "example_end": "row"},
        ),
        factors={
            "optimizer": {
                name: {"optimizer": optimizer, "phases": phases(rate)} for name, (optimizer, rate) in OPTIMIZERS.items()
            }
        },
        margins={"mlm_loss": 0.02},
        rows=HeldOutRows("full_sentences", 32, 1024),
        seeds=1,
    )
