"""Estimated memory against sums computed by hand, and against programs of XLA's CPU compiler."""

import dataclasses

import jax
import pytest

from bert_jax.chips import Sizes
from bert_jax.config import Config, Phase
from bert_jax.config.presets import load_config
from bert_jax.model import families
from bert_jax.objectives.masking import Vocabulary
from bert_jax.planning.memory_model import LAYER_WORKING_SHARE, LOGIT_BYTES, estimate_memory
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import make_mesh
from tests.planning.machines import run
from tests.planning.test_roofline import COPIED, SPLIT, TOTAL

TOLERANCE = 0.15
"""Largest relative error of the total estimate against a compiled program (figures in docs/LOG.md)."""
TOKENS, SCORES = 8 * 16, 8 * 2 * 16 * 16
LAYER = 2 * (2 * TOKENS * 8 + 4 * TOKENS * 8 + 2 * TOKENS * 16) + 16 * TOKENS * 8 + 2 * TOKENS * 8 + SCORES * 7


def test_by_hand_without_remat():
    assert estimate_memory(run(), 0, Sizes(), 1) == {
        "parameters": 4 * TOTAL,
        "moments": 8 * TOTAL,
        "gradients": 4 * (TOTAL + 96 * 8),
        "gathered": 0,
        "casts": 2 * (TOTAL + 2 * (4 * 64 + 2 * 128)),
        "activations": 2 * LAYER,
        "temporaries": int(LAYER_WORKING_SHARE * LAYER) + LOGIT_BYTES * 8 * 2 * 96,
        "batch": 4 * 6 * TOKENS,
    }


@pytest.mark.parametrize(("remat", "kept"), [("full", TOKENS * 8 * 2), ("dots", TOKENS * (8 + 3 * 8 + 2 * 8 + 16) * 2)])
def test_remat_keeps_less(remat, kept):
    assert estimate_memory(run(remat=remat), 0, Sizes(), 1)["activations"] == 2 * kept


def test_differences():
    """Between two settings, the kinds that differ by their bytes."""
    whole, dry = run(), run(hidden_dropout=0.0, attention_dropout=0.0)
    fused = run(hidden_dropout=0.0, attention_dropout=0.0, attention="cudnn")
    base = estimate_memory(whole, 0, Sizes(), 1)
    several = estimate_memory(whole, 0, Sizes(), 4)
    assert several["gradients"] - base["gradients"] == 4 * TOTAL, "their sum"
    assert several["activations"] * 4 == base["activations"] and several["batch"] == base["batch"]
    split = estimate_memory(whole, 0, Sizes(fsdp=4), 1)
    assert split["parameters"] == 4 * (SPLIT // 4 + COPIED) == split["moments"] // 2 and split["gathered"] == 4 * SPLIT
    assert split["gradients"] - base["gradients"] == 4 * (SPLIT // 4 + COPIED), "of the reduce-scatter"
    without_masks = estimate_memory(dry, 0, Sizes(), 1)["activations"]
    assert base["activations"] - without_masks == 2 * (2 * TOKENS * 8 + SCORES)
    assert without_masks - estimate_memory(fused, 0, Sizes(), 1)["activations"] == 2 * 6 * SCORES
    stays = 2 * (2 * 2 * TOKENS * 8 + 16 * TOKENS * 8 + 2 * TOKENS * 8)
    assert estimate_memory(whole, 0, Sizes(tensor=2), 1)["activations"] - stays == (base["activations"] - stays) / 2


def compiled_bytes(config: Config) -> int:
    """Bytes of the step on one CPU device; donated inputs count once."""
    task = Pretraining(config, Vocabulary(config.model.vocab_size, 4, (0, 1, 2, 3, 4)), phase=0)
    program = Programs(task, make_mesh(config.mesh, jax.devices()[:1])).train_step(0, config.phases[0].accumulation)
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "seq_len", "rows", "accumulation"),
    [("none", 256, 8, 2), ("dots", 128, 16, 1), ("full", 128, 32, 1)],
)
def test_estimate_is_near_compiled_programs(remat, seq_len, rows, accumulation):
    model = dataclasses.replace(families.bert(3, 128, vocab_size=4096), remat=remat)
    phase = Phase(seq_len=seq_len, batch_size=rows, accumulation=accumulation)
    config = Config(name="near", model=model, phases=(phase,))
    needed = compiled_bytes(config)
    estimated = sum(estimate_memory(config, 0, Sizes(), accumulation).values())
    assert estimated == pytest.approx(needed, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("remat", "accumulation", "temporary"),
    [("none", 128, 5_138_710_528), ("full", 8, 5_018_386_432)],
)
def test_estimate_is_near_the_tpu_compilers_figure(remat, accumulation, temporary):
    """bert_large_lamb's second phase on v5e:16x16, compiled ahead of time with libtpu 0.0.51 (docs/LOG.md)."""
    config = load_config("bert_large_lamb")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))
    parts = estimate_memory(config, 1, Sizes(256), accumulation)
    assert parts["parameters"] + parts["moments"] == pytest.approx(4_036_766_208, rel=0.001)
    working = sum(parts.values()) - parts["parameters"] - parts["moments"] - parts["batch"]
    assert working == pytest.approx(temporary, rel=TOLERANCE)
