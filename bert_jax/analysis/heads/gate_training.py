"""Trains gates on the task in task/, and measures the model under them beside random heads."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.analysis.heads import gates
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.array_types import Array, Float
from bert_jax.config import MeshConfig
from bert_jax.errors import UserError
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.importance_data import as_source, open_task
from bert_jax.interventions.loss_examples import scored_examples
from bert_jax.interventions.pruning_masks import CONTEXT, Evaluation, Examples, evaluate
from bert_jax.storage.paths import StoredPath
from bert_jax.training.job import newest_params
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import make_mesh

RANDOM_SETS = 3
"""Random sets of heads that are removed beside those whose gates close."""


class GateTraining(NamedTuple):
    """How gates are trained."""

    task: str
    options: FinetuneOptions
    """Of fine-tuning; the learning rate is that of the weights, and 0 freezes them."""
    examples: int
    """Of each dev split."""
    penalty: float
    rate: float
    """Peak learning rate of log alpha."""


def train_gates(inputs: SuiteInputs, training: GateTraining, workdir: StoredPath) -> dict[str, Any]:
    """Train gates in a work directory, or continue there, and evaluate the model under the gates of evaluation.

    Args:
      inputs: with a fine-tuned model.
      training: see `GateTraining`.
      workdir: of the run.

    Returns:
      plain values: gates and probabilities, loss and score under the gates, with all gates 1, with every gate that is
      not 0 set to 1, and without as many random heads, mean of `RANDOM_SETS`.

    Raises:
      UserError: the directory holds another run, task data that do not fit, or the run was stopped.
    """
    model, options = inputs.model, training.options
    train_weights = options.learning_rate != 0
    if not train_weights:
        options = dataclasses.replace(options, learning_rate=training.rate)
    data, options = open_task(model, inputs.data / "task", training.task, options, inputs.seed, training.examples)
    options = options.with_recipe(len(data.train.lengths))
    run = gates.GateRun(
        as_source(model),
        training.task,
        data,
        str(inputs.data / "task"),
        options,
        inputs.seed,
        make_mesh(MeshConfig()),
        Programs,
        penalty=training.penalty,
        gate_rate=training.rate,
        train_weights=train_weights,
    )
    run.check_directories({inputs.seed: workdir})
    if run.train(workdir) is None:
        raise UserError(f"the training of gates in {workdir} was stopped and saved: the same command continues it")
    params = jax.tree.map(np.asarray, newest_params(run.programs, workdir)[0])
    log_alpha = jnp.asarray(params.pop("gates")["log_alpha"])
    trained = LoadedModel(model.config, model.heads, params, model.tokenizer)
    return {
        "steps": options.steps,
        "penalty": training.penalty,
        "weights_trained": train_weights,
        "gates": np.asarray(gates.fixed_gates(log_alpha)),
        "open_probability": np.asarray(gates.open_probabilities(log_alpha)),
        **_measure(trained, scored_examples(data, model.tokenizer.pad_id), log_alpha, inputs.seed),
    }


def _measure(model: LoadedModel, examples: Examples, log_alpha: Float[Array, "L N"], seed: int) -> dict[str, Any]:
    """Number of gates that are 0, and losses and scores with and without the heads."""
    values, rng = np.asarray(gates.fixed_gates(log_alpha)), np.random.default_rng(seed)

    def measured(mask: np.ndarray) -> dict[str, float]:
        found: Evaluation = evaluate(model, examples, {CONTEXT: mask})
        return {"loss": found.loss, "score": found.score}

    closed = values == 0
    randoms = [measured(~rng.permutation(closed.ravel()).reshape(closed.shape)) for _ in range(RANDOM_SETS)]
    return {
        "closed": int(closed.sum()),
        "under_gates": measured(values),
        "closed_removed": measured(~closed),
        "all_open": measured(np.ones(values.shape)),
        "random_removed": {name: float(np.mean([one[name] for one in randoms])) for name in ("loss", "score")},
    }
