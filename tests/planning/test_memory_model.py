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
from tests.planning.test_roofline import COPIED, TOTAL

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


def test_micro_batches_need_a_gradient_sum_and_less_activation_memory():
    one, four = (estimate_memory(run(), 0, Sizes(), n) for n in (1, 4))
    assert four["gradients"] - one["gradients"] == 4 * TOTAL
    assert four["activations"] * 4 == one["activations"]
    assert four["parameters"] == one["parameters"] and four["batch"] == one["batch"]


def test_fsdp_splits_the_state_and_gathers():
    split = TOTAL - COPIED
    parts = estimate_memory(run(), 0, Sizes(fsdp=4), 1)
    assert parts["parameters"] == 4 * (split // 4 + COPIED) == parts["moments"] // 2
    assert parts["gathered"] == 4 * split


def test_without_dropout_no_mask_is_kept():
    dry = estimate_memory(run(hidden_dropout=0.0, attention_dropout=0.0), 0, Sizes(), 1)
    assert estimate_memory(run(), 0, Sizes(), 1)["activations"] - dry["activations"] == 2 * (2 * TOKENS * 8 + SCORES)
    fused = estimate_memory(run(hidden_dropout=0.0, attention_dropout=0.0, attention="cudnn"), 0, Sizes(), 1)
    assert dry["activations"] - fused["activations"] == 2 * 6 * SCORES


def test_tensor_splits_heads_and_feed_forward():
    whole, half = (estimate_memory(run(), 0, Sizes(tensor=n), 1)["activations"] for n in (1, 2))
    stays = 2 * (2 * 2 * TOKENS * 8 + 16 * TOKENS * 8 + 2 * TOKENS * 8)
    assert half - stays == (whole - stays) / 2


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
