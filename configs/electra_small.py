"""ELECTRA-Small: a discriminator of 12 layers of width 256 and a generator of a quarter of its width.

Paper: Clark et al. 2020, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators" (arXiv
2003.10555), table 6; google-research/electra configure_pretraining.py. Replications: richarddwang/electra_pytorch.
Command: bert-jax pretrain electra_small --corpus DIR --workdir DIR
Computes in bfloat16, for accelerators; on a CPU, --model.compute-dtype float32 is faster.
Expected: GLUE test 77.4 after 1M steps on Wikipedia and BooksCorpus, by the paper, which trained 4 days on one V100;
GLUE dev 80.36 on OpenWebText, by google-research/electra and by the replication; not run here. The released
electra-small is another model, trained longer on more text.
From the original: shape, generator, 15 % of the tokens masked, 85 % of them with [MASK] and none with a random token,
weight 50 of the discriminator, shared embeddings of width 128, rate, warmup, decay, batch of 128 rows of 128 tokens,
AdamW without bias correction.
Other differences: ELECTRA multiplies the warmup by the decay; here the warmup replaces the beginning of the decay, at
most 1 % more. Examples are sentences of one document, not two segments of it with token types.
Parameters: 13,483,008 of the discriminator's encoder, 14,196,219 with its head, and the generator's layers and head
(vocabulary of 30,522).
"""

import dataclasses

from bert_jax.config import Config, DataConfig, ObjectiveConfig, OptimizerConfig, Phase, RecoveryConfig
from bert_jax.model import families


def config() -> Config:
    """ELECTRA-Small."""
    return Config(
        name="electra_small",
        model=dataclasses.replace(
            families.bert(num_layers=12, hidden_size=256, embedding_size=128), compute_dtype="bfloat16"
        ),
        objective=ObjectiveConfig(
            token="rtd", pair="none", mask_token_share=0.85, random_token_share=0.0, generator_width=0.25
        ),
        data=DataConfig(format="doc_sentences", example_end="row"),
        optimizer=OptimizerConfig(bias_correction=False),
        phases=(Phase(steps=1_000_000, seq_len=128, batch_size=128, learning_rate=5e-4, warmup_steps=10_000),),
        recovery=RecoveryConfig(spike=15.0),  # of a loss with 50 times the discriminator's
    )
