"""Normalisation of [CLS] in fine-tuning.

Paper: Zhou et al. 2019, arXiv 1911.03918. Its abstract has no formulas: the normalisations are ours
(docs/finetuning.md).
Question: does normalising the [CLS] vector change fine-tuned scores?
Published: several simple normalisations help on text classification.
Command: bert-jax ablate cls_norm --corpus DIR --workdir DIR --task-data GLUE_DIR, with directories cola, rte and sst2
in GLUE_DIR.
Recipe: bert_small with one phase of 100,000 steps of 256 rows of 128 tokens; ours, not that of the paper. All cells
share the pretraining runs. Fine-tuning has the defaults of bert-jax finetune and 3 seeds.
Cost: 3 pretraining runs, 9.1e+17 FLOPs; 1 hours on one H100 by the roofline of bert-jax plan. Fine-tuning of its 135
runs is not included. Not run here.
Fair comparison: fine-tuning seeds and the order of examples are the same in all cells. Scores are of dev, and nothing
was selected on it.
"""

from bert_jax import config as config_lib
from bert_jax.config import Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study


def study() -> Study:
    """Five normalisations."""
    return Study(
        name="cls_norm",
        base=config_lib.replace(
            presets.load_config("bert_small"),
            phases=(Phase(steps=100_000, seq_len=128, batch_size=256, learning_rate=2e-4, warmup_steps=1000),),
        ),
        factors={
            "cls_norm": {
                "none": {},
                "centre": {"tasks": {"cls_norm": "centre"}},
                "standardise": {"tasks": {"cls_norm": "standardise"}},
                "batch": {"tasks": {"cls_norm": "batch"}},
                "layer": {"tasks": {"cls_norm": "layer"}},
            }
        },
        tasks={"cola": {"seeds": 3}, "rte": {"seeds": 3}, "sst2": {"seeds": 3}},
        margins={"cola": 0.02, "rte": 0.02, "sst2": 0.005},
        rows=HeldOutRows("full_sentences", 128, 2048),
    )
