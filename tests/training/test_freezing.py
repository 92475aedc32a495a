"""Frozen parameters in a run: they stay bit for bit, the others move, and each phase has its own."""

import dataclasses

import numpy as np
import pytest

from bert_jax.config import CheckpointConfig, Config
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.training import pretraining
from bert_jax.training.run_directory import checkpoint
from bert_jax.training.sharding import make_mesh
from tests.runs import arrays, final_state

EMBEDDINGS, HEADS = ("encoder/embeddings/.*",), ("layers/.*", "(mlm|pair)/.*")


@pytest.fixture(scope="module")
def config(plain_config) -> Config:
    """Two steps without the embeddings, two of nothing else."""
    phase = dataclasses.replace(plain_config.phases[0], steps=2, batch_size=4, warmup_steps=0)
    return dataclasses.replace(
        plain_config,
        phases=(
            dataclasses.replace(phase, frozen=EMBEDDINGS),
            dataclasses.replace(phase, frozen=HEADS, moments="reset", step_count="reset"),
        ),
        checkpoint=CheckpointConfig(every=2, keep=9),
    )


def moved(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name, array in before.items() if array.tobytes() != after[name].tobytes()}


@pytest.mark.slow
def test_frozen_parameters_stay_and_the_others_move(config, train, tiny_corpus, tiny_programs, tmp_path):
    parts, directory = [CorpusWeight(tiny_corpus)], checkpoint.checkpoint_directory(tmp_path / "run")
    train(config, tmp_path / "run")
    programs = tiny_programs()(pretraining.open_task(config, parts), make_mesh(config.mesh))
    start, shapes = programs.init_state(), {"params": programs.abstract_state(1).params}
    restored = (checkpoint.restore_parts(directory / f"{step:08d}", shapes) for step in (2, 4))
    params = [arrays(start.params), *(arrays(parts["params"]) for parts in restored)]
    state, _ = final_state(tmp_path / "run", config)
    moments = [arrays(start.optimizer.nu), arrays(state.optimizer.nu)]
    names = set(params[0])
    of_embeddings = {name for name in names if name.startswith("encoder/embeddings/")}
    of_heads = {name for name in names if name.startswith(("encoder/layers/", "mlm/", "pair/"))}
    rest = names - of_embeddings - of_heads
    assert len(of_embeddings) > 3 and len(of_heads) > 10 and rest
    assert moved(params[0], params[1]) == of_heads | rest
    assert moved(params[1], params[2]) == of_embeddings | rest
    assert moved(moments[0], moments[1]) == of_embeddings | rest  # which were reset


@pytest.mark.parametrize("phase", [0, 1])
def test_a_pattern_that_matches_nothing_is_refused_before_anything_is_written(config, train, tmp_path, phase):
    """That of a later phase too: its turn may come after days."""
    phases = list(config.phases)
    phases[phase] = dataclasses.replace(phases[phase], frozen=("embedings/.*",))
    wrong = dataclasses.replace(config, phases=tuple(phases))
    with pytest.raises(
        UserError, match=r"frozen: 'embedings/\.\*' matches the end of no parameter's path; similar are embeddings"
    ):
        train(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()
