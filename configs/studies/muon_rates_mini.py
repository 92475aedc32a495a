"""Learning rates of AdamW, LAMB and Muon for `muon_mini_256`: bert_mini at 256 rows, two CPU cores.

Papers: those of `muon_batch`.
Question: which learning rate of each optimizer has the lowest held-out MLM loss after an eighth of the tokens of
`muon_mini_256`?
Published: nothing for masked language models that is known to us.
Command: bert-jax ablate muon_rates_mini --corpus DIR --workdir DIR
Size: 160 causal and 160 masked steps of 256 rows of 32 tokens, 2.6 million tokens in a run, one seed.
Margin: 0.02 nats, stated before any run. One seed has no interval: the study chooses rates and compares nothing.
Cost: 12 runs, 31 million tokens; about a quarter of an hour a run on one core.
Rule: the rates in the middle are 1e-3 for AdamW and Muon, whose updates are scaled to the size of AdamW's, and 1e-2 for
LAMB, whose rate is relative to the norm of a tensor; the others are a third and three times as large. The best one is
taken. If it is at an end, the next one at that end is run, too, until it is not: 1/9 of the middle for LAMB, and 9
and 27 times the middle for Muon.
Causal first: a masked model of this size stays at the unigram loss for millions of tokens (`schedules_mini`), where
rates cannot be told apart.
Other settings: those of `muon_mini_256`, with 8,192 pieces.
"""

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, EvaluationConfig, LogConfig, Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study

OPTIMIZERS = {
    "adamw": ({"name": "adamw"}, 1e-3),
    "lamb": ({"name": "lamb", "lamb_flavour": "paper", "clip_norm": None}, 1e-2),
    "muon": ({"name": "muon"}, 1e-3),
}
FACTORS = {"one": 1.0, "third": 1 / 3, "triple": 3.0}
WIDER = {"lamb": {"ninth": 1 / 9}, "muon": {"ninefold": 9.0, "27fold": 27.0}}
"""Added after the first nine runs."""


def phases(rate: float) -> tuple[Phase, Phase]:
    """Causal, then masked, with one linear decay of the learning rate to 0 after a warmup over 6 % of the steps."""
    rows = {"steps": 160, "seq_len": 32, "batch_size": 256}
    causal = Phase(learning_rate=rate, end_learning_rate=rate / 2, warmup_steps=19, direction="causal", **rows)
    return causal, Phase(learning_rate=rate / 2, warmup_steps=0, **rows)


def study() -> Study:
    """Three optimizers, three to five learning rates, one seed."""
    return Study(
        name="muon_rates_mini",
        base=config_lib.replace(
            presets.load_config("bert_mini"),
            model={
                "vocab_size": 8192,
                "attention": "auto",
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "initializer_range": 0.0625,
            },
            phases=phases(1e-3),
            checkpoint=CheckpointConfig(every=80, keep=1),
            log=LogConfig(every=20, layers=False, tensorboard=False),
            evaluation=EvaluationConfig(every=80, rows=1024),
            objective={"pair": "none", "mask_rate": 0.15},
            data={"format": "doc_sentences", "example_end": "row"},
        ),
        factors={
            "recipe": {
                f"{name}_{label}": {"optimizer": optimizer, "phases": phases(rate * factor)}
                for name, (optimizer, rate) in OPTIMIZERS.items()
                for label, factor in (FACTORS | WIDER.get(name, {})).items()
            }
        },
        margins={"mlm_loss": 0.02},
        rows=HeldOutRows("full_sentences", 32, 1024),
        seeds=1,
    )
