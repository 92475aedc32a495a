"""Dynamic and static masking, mask rate, replacement and unit.

Papers: Liu et al. 2019 (RoBERTa), section 4.1 (static); Devlin et al. 2019, appendix C.2 (replacement); Wettig et al.
2023 (rate); Joshi et al. 2020 (spans); google-research/bert README (whole words).
Question: which settings of masking change the loss, always measured with 15 % of single tokens masked?
Published: static 78.3 F1 on SQuAD 2.0, 84.3 on MNLI-m, 92.5 on SST-2, dynamic 78.7, 84.0, 92.9 (Liu et al.); MNLI of
80/10/10 84.2, of 100/0/0 84.3, of 80/0/20 84.1, of 80/20/0 84.4, of 0/0/100 83.6, as [MASK]/unchanged/random (Devlin
et al.).
Command: bert-jax ablate masking --corpus DIR --workdir DIR
Recipe: bert_small with one phase of 100,000 steps of 256 rows of 128 tokens; ours, not that of the papers.
Cost: 33 runs, 1e+19 FLOPs; 9 hours on one H100 by the roofline of bert-jax plan. Not run here.
Fair rows: all levels read the same rows in the same order. full_sentences examples are the same in every epoch, so
static_1 and static_10 repeat nothing but masks; use a corpus of which the runs read more than 10 epochs (`bert-jax
doctor`).
"""

from bert_jax import config as config_lib
from bert_jax.config import Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study


def study() -> Study:
    """Four properties of masks, one at a time."""
    return Study(
        name="masking",
        base=config_lib.replace(
            presets.load_config("bert_small"),
            phases=(Phase(steps=100_000, seq_len=128, batch_size=256, learning_rate=2e-4, warmup_steps=1000),),
            objective={"pair": "none"},
            data={"format": "full_sentences", "example_end": "row"},
        ),
        factors={
            "masks": {
                "dynamic": {},
                "static_1": {"data": {"mask_copies": 1}},
                "static_10": {"data": {"mask_copies": 10}},
            },
            "rate": {
                "0.15": {},
                "0.30": {"objective": {"mask_rate": 0.3}},
                "0.40": {"objective": {"mask_rate": 0.4}},
            },
            "replacement": {
                "80-10-10": {},
                "100-0-0": {"objective": {"mask_token_share": 1.0, "random_token_share": 0.0}},
                "80-0-20": {"objective": {"mask_token_share": 0.8, "random_token_share": 0.2}},
                "80-20-0": {"objective": {"mask_token_share": 0.8, "random_token_share": 0.0}},
                "0-0-100": {"objective": {"mask_token_share": 0.0, "random_token_share": 1.0}},
            },
            "unit": {
                "token": {},
                "word": {"objective": {"mask_unit": "word"}},
                "span": {"objective": {"mask_unit": "span"}},
            },
        },
        margins={"mlm_loss": 0.02},
        rows=HeldOutRows("full_sentences", 128, 2048),
    )
