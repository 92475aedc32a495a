"""Next-sentence prediction, sentence order and input formats.

Papers: Devlin et al. 2019, section 5.1; Liu et al. 2019 (RoBERTa), section 4.2; Lan et al. 2020 (ALBERT), section
4.6.
Question: do pair objectives help, and how much of it is due to their rows?
Published: without NSP, BERT-base has MNLI 83.9 and QNLI 84.9 instead of 84.4 and 88.4 (Devlin et al.). RoBERTa's
formats have SQuAD 2.0 F1, MNLI-m and SST-2 of 78.7, 84.0 and 92.9 (segment pairs with NSP), 76.2, 82.9 and 92.1
(sentence pairs with NSP), 79.1, 84.7 and 92.5 (full sentences), 79.7, 84.7 and 92.7 (doc sentences).
Command: bert-jax ablate nsp --corpus DIR --workdir DIR --task-data GLUE_DIR, with directories mnli, qnli and sst2 in
GLUE_DIR.
Recipe: bert_small with one phase of 100,000 steps of 256 rows of 128 tokens; ours, not that of the papers.
Tasks: MNLI, QNLI and SST-2, two fine-tuning seeds for each pretraining run. The heads read the mean over the tokens in
all cells: the pooler, which BERT's heads read, is trained by nsp and sop only, and the other levels would begin with a
random one.
Cost: 24 runs, 7.3e+18 FLOPs; 7 hours on one H100 by the roofline of bert-jax plan. Its 144 fine-tuning runs are not
included. Not run here.
Fair rows: the losses are of full_sentences, which only the levels full and doc of the factor format train on: those
have an advantage in it. nsp against none, and sentence_nsp against sentence, are effects of the objective alone: same
rows. sop against none is that of the objective and its rows; ordered has the rows of sop without the objective.
"""

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study


def study() -> Study:
    """Objectives and formats, one at a time."""
    return Study(
        name="nsp",
        base=config_lib.replace(
            presets.load_config("bert_small"),
            phases=(Phase(steps=100_000, seq_len=128, batch_size=256, learning_rate=2e-4, warmup_steps=1000),),
            checkpoint=CheckpointConfig(every=10_000, keep=10),
            objective={"pair": "none"},
        ),
        factors={
            "pair": {
                "none": {},
                "nsp": {"objective": {"pair": "nsp"}},
                "sop": {"objective": {"pair": "sop"}, "data": {"format": "sentence_order"}},
                "ordered": {"data": {"format": "sentence_order"}},
            },
            "format": {
                "segment": {},
                "sentence": {"data": {"format": "sentence_pair"}},
                "sentence_nsp": {"data": {"format": "sentence_pair"}, "objective": {"pair": "nsp"}},
                "full": {"data": {"format": "full_sentences", "example_end": "row"}},
                "doc": {"data": {"format": "doc_sentences", "example_end": "row"}},
            },
        },
        tasks={task: {"pooling": "mean", "seeds": 2} for task in ("mnli", "qnli", "sst2")},
        margins={"mlm_loss": 0.02, "mlm_loss_area": 0.02, "nsp_accuracy": 0.01, "sop_accuracy": 0.01}
        | {"mnli": 0.005, "qnli": 0.005, "sst2": 0.005},
        rows=HeldOutRows("full_sentences", 128, 2048),
    )
