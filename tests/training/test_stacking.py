"""Phases of growing depth: the stack is repeated, and what becomes of moments, counts and checkpoints."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, Config, EvaluationConfig, LogConfig
from bert_jax.inference import loaded_model
from bert_jax.objectives.masking import Vocabulary
from bert_jax.training.param_paths import map_with_paths
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs
from bert_jax.training.run_directory import checkpoint
from bert_jax.training.sharding import make_mesh
from bert_jax.training.state import TrainState
from tests.runs import arrays, assert_same_arrays, assert_same_run

DEPTHS = (1, 2, 4)
STEPS = 2
"""Of each phase."""


@pytest.fixture(scope="module")
def config(tiny_config) -> Config:
    """1, 2, then 4 layers; moments and counts go on, then are reset. Every step is saved."""
    phase = dataclasses.replace(tiny_config.phases[0], steps=STEPS, batch_size=4, warmup_steps=0)
    return dataclasses.replace(
        tiny_config,
        model=dataclasses.replace(tiny_config.model, num_layers=4),
        phases=(
            dataclasses.replace(phase, num_layers=1),
            dataclasses.replace(phase, num_layers=2),
            dataclasses.replace(phase, moments="reset", step_count="reset"),
        ),
        checkpoint=CheckpointConfig(every=1, keep=9),
        log=LogConfig(every=1, tensorboard=False),
        evaluation=EvaluationConfig(every=3, rows=8, batch_size=8),
    )


@pytest.fixture(scope="module")
def programs_of(tiny_programs):
    """Programs of a config on one device, without corpora."""
    mesh = make_mesh(config_lib.MeshConfig(), jax.devices()[:1])
    return lambda config: tiny_programs()(Pretraining(config, Vocabulary(120, 4, (0, 1, 2, 3, 4))), mesh)


def random_state(programs: Programs, phase: int) -> TrainState:
    """As if it had been trained: no array is zero, and each count is another one."""
    rng, counts = np.random.default_rng(0), iter(range(7, 99))

    def draw(path, leaf):
        if leaf.ndim == 0:
            return leaf.dtype.type(next(counts))
        lowest = 0.1 if "/nu/" in path else -1.0
        return rng.uniform(lowest, 1.0, leaf.shape).astype(leaf.dtype)

    abstract = programs.abstract_state(phase)
    return jax.device_put(map_with_paths(draw, abstract), jax.tree.map(lambda x: x.sharding, abstract))


def assert_grown(found, there, depth: int) -> None:
    """Layer l is layer l mod L, and all else is what it was, bit for bit."""
    found, there = arrays(found), arrays(there)
    assert found.keys() == there.keys()
    layered = [name for name in there if "/layers/" in name]
    assert 8 < len(layered) < len(there)
    for name, array in there.items():
        if name in layered:
            assert len(found[name]) == depth
            for layer in range(depth):
                np.testing.assert_array_equal(found[name][layer], array[layer % len(array)], err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("phase", "moments", "step_count"),
    [(1, "keep", "keep"), (1, "keep", "reset"), (1, "reset", "reset"), (2, "keep", "keep")],
)
def test_what_becomes_of_the_state(config, programs_of, phase, moments, step_count):
    phases = tuple(dataclasses.replace(p, moments=moments, step_count=step_count) for p in config.phases)
    programs = programs_of(dataclasses.replace(config, phases=phases))
    before = random_state(programs, phase - 1)
    after = programs.enter_phase(before, phase)
    assert_grown(after.params, before.params, DEPTHS[phase])
    if moments == "keep":
        assert_grown(after.optimizer.mu, before.optimizer.mu, DEPTHS[phase])
        assert_grown(after.optimizer.nu, before.optimizer.nu, DEPTHS[phase])
    else:
        assert not any(array.any() for array in arrays((after.optimizer.mu, after.optimizer.nu)).values())
        assert arrays(after.optimizer.mu).keys() == arrays(after.params).keys()
    count = int(before.optimizer.count)
    assert count > 1 and int(after.optimizer.count) == (count if step_count == "keep" else 0)
    assert int(after.step) == int(before.step)
    assert int(after.divergence.skipped_steps) == int(before.divergence.skipped_steps) > 0
    assert int(after.divergence.finite_losses) == 0
    found, expected = (
        jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (after, programs.abstract_state(phase))
    )
    assert found == expected


def test_shared_layers_grow_without_parameters(config, programs_of):
    """ALBERT: one set of parameters, used once, twice, four times."""
    programs = programs_of(config_lib.replace(config, model={"parameter_groups": 1}))
    before = random_state(programs, 0)
    after = programs.enter_phase(before, 1)
    assert_same_arrays((after.params, after.optimizer), (before.params, before.optimizer))
    assert {len(array) for name, array in arrays(after.params).items() if "/layers/" in name} == {1}


@pytest.fixture(scope="module")
def whole(config, train, tmp_path_factory):
    """The run, uninterrupted."""
    workdir = tmp_path_factory.mktemp("growing") / "run"
    assert train(config, workdir).ended == "steps"
    return workdir


def cut_at(workdir, step: int, directory):
    """A copy of a run as if it had been stopped after a step."""
    copy = directory / f"cut{step}"
    shutil.copytree(workdir, copy)
    for save in (copy / "checkpoints").iterdir():
        if int(save.name) > step:
            shutil.rmtree(save)
    return copy


@pytest.mark.slow
def test_every_checkpoint_has_the_depth_that_it_was_trained_with(whole, tmp_path):
    """That of the switch still has the old one."""
    for step in (STEPS, STEPS + 1, 2 * STEPS + 1):
        depth = DEPTHS[(step - 1) // STEPS]
        cut = cut_at(whole, step, tmp_path)
        newest = checkpoint.newest_intact(checkpoint.checkpoint_directory(cut))
        assert int(newest.name) == step and DEPTHS[checkpoint.read_metadata(newest)["phase"]] == depth
        model = loaded_model.load(cut)
        assert model.config.num_layers == depth
        assert {len(array) for name, array in arrays(model.params).items() if "/layers/" in name} == {depth}
        if step == STEPS + 1:
            assert np.isfinite(model.encode(["the river sings"])).all()


@pytest.mark.slow
@pytest.mark.parametrize("step", [STEPS + 1, 2 * STEPS])
def test_stopped_right_before_or_after_a_switch(whole, config, train, tmp_path, step):
    cut = cut_at(whole, step, tmp_path)
    progress = train(config, cut)
    assert progress.ended == "steps" and progress.cursor.step == 3 * STEPS
    assert_same_run(cut, whole, config)
