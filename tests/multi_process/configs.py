"""Corpora whose sentences are all distinct, and the configs of all cases."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np

from bert_jax.config import Config, DataConfig, EvaluationConfig, ModelConfig, ObjectiveConfig, Phase
from data_prep.build_options import BuildOptions
from data_prep.builder.engines.local import LocalEngine
from data_prep.builder.pipeline import BuildRequest, build
from tests import building

WORDS = [word for word in building.WORDS if word != "a"]
"""Without "a": the sentence splitter takes "a." for an abbreviation."""
STEPS = 51
"""Steps 0 to 50."""
CHUNK_TOKENS, WINDOW_CHUNKS = 200, 6
"""Replace those of data/epoch_plan.py, so that an epoch has several windows."""
PREFETCH = {1: 1, 4: 7}
READER_PROCESSES = {1: 0, 4: 1}
"""By number of processes, so that the compared runs prepare their batches in different ways."""
DEVICES = {1: 1, 4: 2}
"""Devices per process, by number of processes."""

MODEL = ModelConfig(vocab_size=96, hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128, max_positions=64)
PHASES = (
    Phase(steps=30, seq_len=48, batch_size=16, accumulation=2, start_batch_size=8, ramp_steps=10, warmup_steps=2),
    Phase(steps=STEPS - 30, seq_len=64, batch_size=8, warmup_steps=2),
)
RUNS = Config(
    name="runs",
    model=MODEL,
    objective=ObjectiveConfig(pair="none", mask_unit="ngram"),
    data=DataConfig(format="doc_sentences", examples_per_row=8),
    phases=PHASES,
    evaluation=EvaluationConfig(rows=42, batch_size=8),
)
STREAMS = {
    "doc_sentences": RUNS,
    "mixture": dataclasses.replace(
        RUNS, data=DataConfig(mixture_exponent=0.7, examples_per_row=8), objective=ObjectiveConfig()
    ),
}
"""The last case reads two corpora, with four processes through reader processes."""


def make_document(rng: np.random.Generator, prefixes) -> str:
    """One to eight sentences of 3 to 14 words, a few of 70; the first three words are unique to each sentence."""

    def sentence() -> str:
        size = 67 if rng.random() < 0.02 else int(rng.integers(0, 12))
        return " ".join([*next(prefixes), *rng.choice(WORDS, size)]).capitalize() + "."

    return " ".join(sentence() for _ in range(rng.integers(1, 9)))


def build_corpora(directory: Path) -> list[Path]:
    """A corpus of 150 documents and one of 60, with one tokenizer."""
    rng = np.random.default_rng(0)
    prefixes = iter(rng.permutation(list(itertools.product(WORDS, repeat=3))))
    directories = []
    for name, count in (("large", 150), ("small", 60)):
        text = directory / f"{name}.txt"
        text.write_text("\n\n".join(make_document(rng, prefixes) for _ in range(count)))
        options = BuildOptions(validation_fraction=0.15)
        sources = [building.parse(f"text:{text}")]
        build(BuildRequest(sources, building.make_tokenizer(), directory / name, name, options), LocalEngine(1))
        directories.append(directory / name)
    return directories
