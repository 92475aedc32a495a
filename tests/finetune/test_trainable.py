"""Steps that train a part of the parameters: frozen ones stay bit for bit, the others move."""

import dataclasses

import numpy as np
import pytest

from bert_jax.finetune.trainable import ALL_BUT_ADAPTERS, ENCODER
from tests.finetune.tiny_task import HEAD, MODEL, arrays, make_programs, make_task, take_step

pytestmark = pytest.mark.usefixtures("quick_compilation")


def is_norm_or_adapter(name: str) -> bool:
    return any(part in name for part in ("/norm/", "_norm/", "_adapter/"))


def is_pooler_or_head(name: str) -> bool:
    return name.startswith(("encoder/pooler/", "task/"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frozen", "is_trained"),
    [
        (ALL_BUT_ADAPTERS, lambda name: is_norm_or_adapter(name) or name.startswith("task/")),
        (ENCODER, is_pooler_or_head),
    ],
    ids=["adapters", "head"],
)
def test_only_these_move(frozen, is_trained):
    model = dataclasses.replace(MODEL, adapter_size=3, norm_placement="pre")
    programs = make_programs(make_task(dataclasses.replace(HEAD, mix=True), model, frozen=frozen))
    state = programs.init_state()
    before = arrays(state.params)
    state, _ = take_step(programs, state)
    after, moments = arrays(state.params), arrays(state.optimizer.nu)
    assert sum("_adapter/" in name for name in before) == 8 and "encoder/final_norm/scale" in before
    trained = {name for name in before if is_trained(name)}
    assert {name for name in before if before[name].tobytes() != after[name].tobytes()} == trained
    assert {name for name in moments if np.any(moments[name])} == trained
