"""Depth and attention heads at equal steps.

Papers: K et al. 2020, "Cross-Lingual Ability of Multilingual BERT"; Devlin et al. 2019, section 5.2, table 6.
Question: what do more layers bring, and what more heads of the same total width?
Published: K et al.: depth matters most, and so does the number of parameters; heads matter less. Devlin et al., by
layers and heads: 3 and 12 have perplexity 5.84, 6 and 3 5.24, 6 and 12 4.68, 12 and 12 3.99.
Command: bert-jax ablate depth_vs_heads_steps --corpus DIR --workdir DIR
Recipe: bert_small with one phase of 100,000 steps of 256 rows of 128 tokens; ours, not that of the papers.
Cost: 21 runs, 5.8e+18 FLOPs; 5 hours on one H100 by the roofline of bert-jax plan. Not run here.
Budget: Deeper levels have more parameters and FLOPs; depth_vs_heads compares at equal parameters.
"""

from bert_jax import config as config_lib
from bert_jax.config import Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study


def study() -> Study:
    """Depth and heads, one at a time."""
    return Study(
        name="depth_vs_heads_steps",
        base=config_lib.replace(
            presets.load_config("bert_small"),
            phases=(Phase(steps=100_000, seq_len=128, batch_size=256, learning_rate=2e-4, warmup_steps=1000),),
        ),
        factors={
            "depth": {
                "4": {},
                "1": {"model": {"num_layers": 1}},
                "2": {"model": {"num_layers": 2}},
                "6": {"model": {"num_layers": 6}},
            },
            "heads": {
                "8": {},
                "1": {"model": {"num_heads": 1}},
                "2": {"model": {"num_heads": 2}},
                "16": {"model": {"num_heads": 16}},
            },
        },
        margins={"mlm_loss": 0.02, "nsp_accuracy": 0.01},
        rows=HeldOutRows("full_sentences", 128, 2048),
        equal="steps",
    )
