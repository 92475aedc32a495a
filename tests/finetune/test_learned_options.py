"""Options that change the model, or what is trained: the task is learned, the result has their parameters, and frozen
ones stay bit for bit.
"""

import dataclasses

import numpy as np
import pytest

from bert_jax.convert.conversion import convert
from bert_jax.convert.formats import input_formats
from bert_jax.errors import UserError
from bert_jax.finetune import finetune
from bert_jax.finetune.finetuning_task import ALL_BUT_ADAPTERS, ENCODER
from bert_jax.finetune.options import FinetuneOptions
from tests.finetune import task_files
from tests.finetune.tiny_task import HEAD, MODEL, arrays, make_programs, make_task, take_step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
OPTIONS = FinetuneOptions(steps=200, batch_size=16, learning_rate=3e-3, dropout=0.0)


@pytest.mark.parametrize(
    ("changes", "fitted"),
    [
        ({"adapter_size": 8, "cls_norm": "batch", "mix": True}, ["cls_norm/variance", "mix/weights"]),
        ({"cls_norm": "standardise", "layer_decay": 0.7, "new_layers": 1}, ["cls_norm/mean", "cls_norm/std"]),
    ],
    ids=["adapters, batch, mix", "standardise, layer decay, new layers"],
)
def test_learned_with_options(changes, fitted, tiny_run, tmp_path):
    task_files.write_glue(tmp_path / "sst2", "sst2")
    options = dataclasses.replace(OPTIONS, **changes)
    result = finetune.finetune(tiny_run, "sst2", tmp_path / "sst2", tmp_path / "run", options)
    assert result.seeds[0].metrics["accuracy"] > 0.7 and not result.seeds[0].failed
    assert convert(tmp_path / "run", tmp_path / "native", "bert-jax").passed
    with input_formats.open_model(tiny_run) as before, input_formats.open_model(tmp_path / "native") as after:
        start, end = arrays(before.model.params), arrays(after.model.params)
    for name in fitted:
        assert not np.isin(end[f"task/{name}"], (0.0, 1.0)).any()
    if "adapter_size" in changes:
        kept = [name for name in start.keys() & end.keys() if "norm" not in name]
        assert len(kept) > 10 and all(start[name].tobytes() == end[name].tobytes() for name in kept)


def test_pooling(tiny_run, tmp_path):
    """The head reads the mean, not the pooler; transformers' BERT has no such head."""
    task_files.write_glue(tmp_path / "sst2", "sst2")
    options = dataclasses.replace(OPTIONS, steps=60, pooling="mean")
    assert not finetune.finetune(tiny_run, "sst2", tmp_path / "sst2", tmp_path / "run", options).seeds[0].failed
    with input_formats.open_model(tmp_path / "run") as run:
        assert run.model.heads.task.reads == "mean" and "pooler" not in run.model.params["encoder"]
    with pytest.raises(UserError, match=r"a head that reads 'mean' cannot be written as bert, .*--to bert-jax"):
        convert(tmp_path / "run", tmp_path / "exported", "huggingface")
    assert not (tmp_path / "exported").exists()
    assert convert(tmp_path / "run", tmp_path / "native", "bert-jax").passed


def is_norm_or_adapter(name: str) -> bool:
    return any(part in name for part in ("/norm/", "_norm/", "_adapter/"))


def is_pooler_or_head(name: str) -> bool:
    return name.startswith(("encoder/pooler/", "task/"))


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
