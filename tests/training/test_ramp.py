"""A batch size that ramps up: one program for all sizes, and padding that counts for nothing."""

import dataclasses

import jax
import numpy as np
import pytest

from bert_jax.config import Config
from bert_jax.data.cursor import Cursor
from bert_jax.data.mixture import CorpusWeight
from bert_jax.training import pretraining
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import put_step_inputs
from bert_jax.training.sharding import make_mesh, put_rows
from tests.runs import arrays, numbers

SIZES = [4, 4, 8, 8, 12, 12, 16, 16]


@pytest.fixture(scope="module")
def config(plain_config) -> Config:
    """Eight steps of 4 to 16 rows, in micro-batches of 4."""
    phase = dataclasses.replace(plain_config.phases[0], batch_size=16, start_batch_size=4, ramp_steps=8, accumulation=4)
    return dataclasses.replace(plain_config, phases=(phase,))


def one_step(task: Pretraining, make_programs, rows: dict[str, np.ndarray], micro_batches: int) -> tuple[dict, dict]:
    """Metrics, and first moments by name, of a step from fresh parameters."""
    phase, mesh = task.config.phases[0], make_mesh(task.config.mesh)
    batch, inputs = (
        put_rows(rows, mesh, phase.batch_size),
        put_step_inputs(5e-3, micro_batches, task.config.seed, mesh),
    )
    programs = make_programs()(task, mesh)
    state, metrics = programs.train_step(0, phase.accumulation)(programs.init_state(), batch, inputs)
    moments = {name: array.astype(np.float64) for name, array in arrays(state.optimizer.mu).items()}
    return {name: float(value) for name, value in metrics.items()}, moments


@pytest.mark.slow
def test_a_partial_batch_is_a_batch_of_its_size(config, tiny_corpus, tiny_programs):
    """Against a program for exactly so many rows; the first moment is the gradient but for a factor. The inputs say how
    many micro-batches are computed, else padding would cost as much as rows.
    """
    size = 12
    task = pretraining.open_task(config, [CorpusWeight(tiny_corpus)])
    rows = task.train.rows_at(task.train.cursor_at(Cursor(), SIZES.index(size)))
    assert len(rows["row"]) == size and (rows["pair_labels"] >= 0).sum() > 1
    exact = dataclasses.replace(config.phases[0], batch_size=size, start_batch_size=None, ramp_steps=0, accumulation=3)
    exact_task = dataclasses.replace(task, config=dataclasses.replace(config, phases=(exact,)))
    expected, expected_moments = one_step(exact_task, tiny_programs, rows, 1)
    found, moments = one_step(task, tiny_programs, rows, size // 4)
    assert found["tokens"] == expected["tokens"] == (rows["segment_ids"] > 0).sum()
    for name in ("loss", "mlm_loss", "pair_loss", "pair_accuracy"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, err_msg=name)
    assert found.keys() == expected.keys() and expected["gradient_norm"] > 0.1
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-8, err_msg=name)
    for name, moment in expected_moments.items():
        assert np.linalg.norm(moments[name] - moment) <= 1e-5 * np.linalg.norm(moment), name
    # Loss terms are divided by what the whole batch predicts, so parts of it add up: one micro-batch is four rows.
    losses = [one_step(task, tiny_programs, rows, micro_batches)[0]["loss"] for micro_batches in (1, 2, 3, 4)]
    assert 0.2 < losses[0] / losses[2] < 0.5 < losses[1] / losses[2] < 0.8 and losses[3] == losses[2]


def test_padding_is_neither_text_nor_example(config, tiny_corpus):
    task = pretraining.open_task(config, [CorpusWeight(tiny_corpus)])
    rows = task.train.rows_at(task.train.normalize_cursor(Cursor()))
    batch = jax.device_get(put_rows(rows, make_mesh(config.mesh), 16))
    for name, array in batch.items():
        np.testing.assert_array_equal(array[:4], rows[name], err_msg=name)
    assert not batch["segment_ids"][4:].any()
    assert (batch["example_id"][4:] == -1).all() and (batch["pair_labels"][4:] == -1).all()


@pytest.mark.slow
def test_a_ramp_is_one_program(config, tiny_corpus, tiny_programs, tmp_path):
    """What the loop calls is compiled ahead for one shape: it could take no other."""
    made, counts = [], []
    make = tiny_programs(lambda _, inputs: counts.append(int(inputs.micro_batches)))

    def make_counted(task, mesh):
        programs = make(task, mesh)
        train_step = programs.train_step
        programs.train_step = lambda *arguments: made.append(arguments) or train_step(*arguments)
        return programs

    progress = pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], tmp_path / "run", make_programs=make_counted)
    assert made == [(0, 4)] and counts == [size // 4 for size in SIZES]
    assert progress.cursor.rows == sum(SIZES)
    tokens = np.diff([0, *(line["tokens_seen"] for line in numbers(tmp_path / "run", "train"))])
    assert all(size * 16 < count <= size * 32 for size, count in zip(SIZES, tokens, strict=True))
