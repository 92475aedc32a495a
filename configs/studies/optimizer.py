"""AdamW and LAMB in their published forms.

Papers: Loshchilov and Hutter 2019 (AdamW); You et al. 2020 (LAMB); google-research/bert, google-research/albert and
NVIDIA/DeepLearningExamples (code).
Question: do the differences between the published codes change the loss: bias correction, beta2, trust ratios?
Published: nothing at equal settings is known to us.
Command: bert-jax ablate optimizer --corpus DIR --workdir DIR
Recipe: bert_small with one phase of 100,000 steps of 256 rows of 128 tokens; ours, not that of the papers.
Cost: 18 runs, 5.5e+18 FLOPs; 5 hours on one H100 by the roofline of bert-jax plan. Not run here.
Rates: AdamW's is that of the base; LAMB's is 5/(2^3.5 * 1e3), You et al. for 256 rows.
"""

from bert_jax import config as config_lib
from bert_jax.config import Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study

LAMB_RATE = {"learning_rate": 5 / (2**3.5 * 1e3)}


def study() -> Study:
    """Six optimizers."""
    return Study(
        name="optimizer",
        base=config_lib.replace(
            presets.load_config("bert_small"),
            phases=(Phase(steps=100_000, seq_len=128, batch_size=256, learning_rate=1e-4, warmup_steps=1000),),
        ),
        factors={
            "optimizer": {
                "adamw": {},
                "adamw_uncorrected": {"optimizer": {"bias_correction": False}},
                "adamw_beta2_0.98": {"optimizer": {"beta2": 0.98}},
                "lamb_paper": {"optimizer": {"name": "lamb", "lamb_flavour": "paper"}, "phases": LAMB_RATE},
                "lamb_google": {"optimizer": {"name": "lamb", "lamb_flavour": "google"}, "phases": LAMB_RATE},
                "lamb_nvidia": {"optimizer": {"name": "lamb", "lamb_flavour": "nvidia"}, "phases": LAMB_RATE},
            },
        },
        margins={"mlm_loss": 0.02, "nsp_accuracy": 0.01},
        rows=HeldOutRows("full_sentences", 128, 2048),
    )
