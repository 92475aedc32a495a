"""The statistics of [CLS] that `TaskHead.cls_norm` centre and standardise subtract and divide by, computed once before
fine-tuning (model/cls_norm.py).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np

from bert_jax.array_types import Array, Float
from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads
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


def fit_cls_norm_to_rows(
    config: ModelConfig, heads: Heads, params: Params, batches: Iterable[Mapping[str, np.ndarray]]
) -> Params:
    """`fit_cls_norm` on packed rows; the encoder runs on one device, without dropout.

    Args:
      config, heads: of the model.
      params: of the model; numpy arrays, or all on one device.
      batches: all training rows, e.g. `ExampleRows.in_order`; slots with `example_id` -1 do not count.
    """
    read = _cls_reader(config, heads)

    def vectors(rows: Mapping[str, np.ndarray]) -> np.ndarray:
        inputs = EncoderInputs(*(rows[name] for name in EncoderInputs._fields))
        return np.asarray(read(params, inputs))[rows["example_id"] >= 0]

    return fit_cls_norm(params, map(vectors, batches))


def _cls_reader(config: ModelConfig, heads: Heads) -> Callable[[Params, EncoderInputs], Float[Array, "B K H"]]:
    """The [CLS] vectors that the head normalises, float32."""
    assert heads.task is not None
    plain_head = dataclasses.replace(heads.task, cls_norm="none", reads="cls")
    plain = dataclasses.replace(heads, task=plain_head, pooler=heads.has_pooler)

    @jax.jit
    def read(params: Params, inputs: EncoderInputs) -> Array:
        task = {name: tree for name, tree in params["task"].items() if name != "cls_norm"}
        model = bert.model_from_params(config, plain, params | {"task": task})
        output = model.encoder(inputs, read_state=model.state_reader(inputs))
        return model.task_features(inputs, output)[0].astype("float32")

    return read
