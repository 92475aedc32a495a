"""The statistics of [CLS] that `TaskHead.cls_norm` centre and standardise subtract and divide by, computed once before
fine-tuning (model/cls_norm.py).
"""

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.array_types import Float
from bert_jax.errors import UserError
from bert_jax.finetune.finetuning_task import FineTuning
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import Batch
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import put_equal, put_rows, round_up_to_shards
from bert_jax.training.task import Params


def fit_cls_norm(params: Params, cls_vectors: Iterable[Float[np.ndarray, "_ H"]]) -> Params:
    """Parameters whose `task/cls_norm` has the mean, and if it standardises the standard deviation, of [CLS] vectors.

    Args:
      params: of a model with `cls_norm` centre or standardise.
      cls_vectors: of all training examples, in parts of any size. Sums are float64, and parts are combined as in Chan,
        Golub and LeVeque (1983), so that the result depends on the parts by rounding only.

    Raises:
      UserError: there are no vectors.
    """
    count, mean, squares = 0, np.zeros(1), np.zeros(1)
    for part in cls_vectors:
        if not len(part):
            continue
        vectors = part.astype(np.float64)
        part_mean = vectors.mean(0)
        difference, total = part_mean - mean, count + len(vectors)
        squares = squares + np.square(vectors - part_mean).sum(0)
        squares += np.square(difference) * (count * len(vectors) / total)
        mean, count = mean + difference * (len(vectors) / total), total
    if not count:
        raise UserError("finetune.head.cls_norm: there are no training examples to compute the mean of [CLS] from")
    old = params["task"]["cls_norm"]
    new = {"mean": mean.astype(np.float32), "std": np.sqrt(squares / count).astype(np.float32)}
    return params | {"task": params["task"] | {"cls_norm": {name: new[name] for name in old}}}


def fit_cls_norm_to_task(task: FineTuning, mesh: Mesh, params: Params) -> Params:
    """`fit_cls_norm` on all training examples of a task, without dropout, with rows split over the devices of a mesh.

    Args:
      task: with `cls_norm` centre or standardise; batches have `evaluation.batch_size` rows.
      mesh: of the run.
      params: of the model, numpy arrays; equal on all processes.
    """
    programs = Programs(_ClsReader(*(getattr(task, field.name) for field in dataclasses.fields(FineTuning))), mesh)
    count, (index, processes) = round_up_to_shards(task.config.evaluation.batch_size, mesh), task.process
    share = slice(index * count // processes, (index + 1) * count // processes)
    shardings = jax.tree.map(lambda x: x.sharding, programs.abstract_state(task.phase).params)
    step, on_mesh = programs.eval_step(task.phase), put_equal(params, shardings, task.config.start.source)

    def vectors(rows: Mapping[str, np.ndarray]) -> np.ndarray:
        scored, _ = step(on_mesh, put_rows({name: array[share] for name, array in rows.items()}, mesh, count))
        cls, examples = np.asarray(scored["cls"]), rows["example_id"]
        return cls[np.repeat(examples >= 0, cls.shape[1] // examples.shape[1], axis=1)]

    return fit_cls_norm(params, map(vectors, task.train.in_order(count)))


class _ClsReader(FineTuning):
    """A task that scores rows with the [CLS] vectors that its head normalises."""

    def score(self, params: Params, batch: Batch) -> tuple[Batch, dict[str, WeightedSum]]:
        """The rows with `cls`, [B, K, H] float32, and no sums."""
        plain = dataclasses.replace(
            self.heads,
            task=dataclasses.replace(self.head, cls_norm="none", reads="cls"),
            pooler=self.heads.has_pooler,
        )
        head_params = {name: tree for name, tree in params["task"].items() if name != "cls_norm"}
        model = bert.model_from_params(self.config.model, plain, params | {"task": head_params})
        inputs = EncoderInputs(*(batch[name] for name in EncoderInputs._fields))
        features, _ = model.task_features(inputs, model.encode(inputs))
        return batch | {"cls": features.astype(jnp.float32)}, {}
