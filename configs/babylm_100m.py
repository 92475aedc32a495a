"""GPT-BERT's recipe for 100 million words (BabyLM, strict), with masked tokens only.

Paper: Charpentier and Samuel 2024, "GPT or BERT: why not both?" (arXiv 2410.24159); ltgoslo/gpt-bert,
pretraining/train_100m.py and configs/base.json.
Command: bert-jax pretrain babylm_100m --corpus DIR --workdir DIR
Expected: not run here, and no score of this objective is known.
Parameters: 111,693,312 of the encoder, 112,300,288 with the MLM head (vocabulary of 16,384).
The recipe is that of babylm_10m with its differences from the original; width, vocabulary, rate and steps differ.
"""

import dataclasses

from bert_jax.config import Config
from bert_jax.config.presets import load_config


def config() -> Config:
    """GPT-BERT base, masked tokens only."""
    smaller, cooldown, rate = load_config("babylm_10m"), 250, 1e-2
    model = dataclasses.replace(smaller.model, hidden_size=768, num_heads=12, intermediate_size=2560, vocab_size=16_384)
    first, last = smaller.phases
    steps = 15_625 - cooldown
    first = dataclasses.replace(
        first,
        steps=steps,
        ramp_steps=steps,
        learning_rate=rate,
        warmup_steps=250,
        decay_start=250,
        end_learning_rate=rate / 10,
    )
    last = dataclasses.replace(last, steps=cooldown, learning_rate=rate / 10)
    return dataclasses.replace(smaller, name="babylm_100m", model=model, phases=(first, last))
