"""LAMB, AdamW and Muon at batches of 256 and 2,048 rows, each with its best of three learning rates.

Papers: You et al. 2020 (LAMB); Loshchilov and Hutter 2019 (AdamW); Jordan et al. 2024 and Liu et al. 2025,
"Muon is Scalable for LLM Training" (Muon).
Question: which optimizer reaches the lowest loss of a small masked LM at equal tokens, and does the batch matter?
Published: no comparison on masked language models is known to us.
Command: bert-jax ablate muon_batch --corpus DIR --workdir DIR
Recipe: bert_mini with one phase of 5,000 steps of 256 rows of 128 tokens (164 million tokens), 625 of 2,048 rows; ours.
Cost: 54 runs, 2.4e+17 FLOPs. Not run here.
Rates: at 256 rows, 5e-4 for AdamW and Muon, and 5/(2^3.5 * 1e3) for LAMB (You et al.); at 2,048 rows they are
multiplied by the square root of 8. Each is swept by factors of 1/3, 1 and 3. Compare the best rate of one optimizer
with the best rate of another at the same batch; a best rate at the end of its sweep asks for a wider one:
add the next rate as a level. With bert_mini and 2.6 million tokens (`muon_rates_mini`), the best rate of Muon is 9e-3
and that of AdamW 1e-3.
Other settings: 6 % warmup, a linear decay to 0, weight decay 0.01, masks of 15 %, no dropout, no pair objective.
"""

from bert_jax import config as config_lib
from bert_jax.config import Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study

OPTIMIZERS = {
    "adamw": ({"name": "adamw"}, 5e-4),
    "lamb": ({"name": "lamb", "lamb_flavour": "paper", "clip_norm": None}, 5 / (2**3.5 * 1e3)),
    "muon": ({"name": "muon"}, 5e-4),
}
FACTORS = {"one": 1.0, "third": 1 / 3, "triple": 3.0}


def study() -> Study:
    """Three optimizers, two batches, three learning rates."""
    levels = {}
    for batch_size in (256, 2048):
        for name, (optimizer, rate) in OPTIMIZERS.items():
            for label, factor in FACTORS.items():
                phases = {"batch_size": batch_size, "learning_rate": rate * factor * (batch_size / 256) ** 0.5}
                levels[f"{name}_{batch_size}_{label}"] = {"optimizer": optimizer, "phases": phases}
    return Study(
        name="muon_batch",
        base=config_lib.replace(
            presets.load_config("bert_mini"),
            model={"hidden_dropout": 0.0, "attention_dropout": 0.0},
            objective={"pair": "none"},
            data={"format": "doc_sentences", "example_end": "row"},
            phases=(Phase(steps=5000, seq_len=128, batch_size=256, learning_rate=5e-4, warmup_steps=300),),
        ),
        factors={"recipe": levels},
        margins={"mlm_loss": 0.02},
        rows=HeldOutRows("full_sentences", 128, 2048),
    )
