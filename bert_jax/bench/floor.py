"""The floor of a train step: the time of the work that it cannot avoid, each kind alone and in its best form.

Matrix products have the shapes of the model, with operands as the product reads them. Element-wise work is that of a
layer, forward and backward, on arrays that exist already. The update reads parameters, moments and gradients, and
writes all but the gradients. A step adds copies, layout changes, residuals, lookups, masking and dispatch, and small
work that is left out here: gradients of biases, the norm of all gradients, and what surrounds embeddings and decoder.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array
from bert_jax.bench import harness
from bert_jax.bench.train_step import Case, config_of, predictions
from bert_jax.config import ModelConfig
from bert_jax.model import bert
from bert_jax.model.dropout import DropoutKey, dropout
from bert_jax.model.heads import label_log_likelihoods
from bert_jax.model.layer_plan import count_last_layer_positions
from bert_jax.model.layers import ACTIVATIONS
from bert_jax.model.norms import LayerNorm
from bert_jax.training.pretraining_task import heads_of

Program = Callable[[], Any]


def is_floor_of(case: Case) -> bool:
    """Whether the step of a case does this work: with AdamW, in one micro-batch, and scores in memory."""
    settings = case.optimizer, case.accumulation, case.remat, case.dense_dtype, case.rows, case.pair
    return settings == ("adamw", 1, "none", "compute", "full", "none") and case.attention in ("reference", "deferred")


class FloorStep:
    """The work of a step with AdamW and without sentence pairs; timed like a train step, and has no loss."""

    def __init__(self, case: Case):
        config = config_of(case)
        model = config.model
        self.draw = np.random.default_rng(0)
        targets = predictions(case.seq_len)
        last = count_last_layer_positions(model.num_layers, targets, case.seq_len)
        layers, rows = model.num_layers - 1, case.batch
        parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(bert.shapes(model, heads_of(config))))
        self.programs: list[tuple[Program, int]] = [
            (self._products(layer_products(model, rows, case.seq_len, case.seq_len), model), layers),
            (self._products(layer_products(model, rows, last, case.seq_len), model), 1),
            (self._products(head_products(model, rows * targets), model), 1),
            (self._elementwise(model, rows, case.seq_len, case.seq_len), layers),
            (self._elementwise(model, rows, last, case.seq_len), 1),
            (self._loss(model, rows * targets), 1),
            (self._update(parameters), 1),
        ]
        self.memory_bytes = None

    def time_steps(self, steps: int) -> float:
        """Seconds of `steps` steps, until the device has finished."""
        with harness.measure_seconds() as timing:
            for _ in range(steps):
                for program, calls in self.programs:
                    for _ in range(calls):
                        result = program()
                    jax.block_until_ready(result)
        return timing["seconds"]

    def loss(self) -> None:
        """There is none."""

    def _array(self, *shape: int, dtype: Any = jnp.float32) -> Array:
        numbers = self.draw.standard_normal(2**16 - 3, np.float32)
        return jnp.asarray(np.resize(numbers, shape), dtype)

    def _products(self, shapes: list[tuple[int, int, int, int]], model: ModelConfig) -> Program:
        """All products of (count, m, k, n), one after the other."""
        pairs = [
            (self._array(count, m, k, dtype=model.compute_dtype), self._array(count, k, n, dtype=model.compute_dtype))
            for count, m, k, n in shapes
        ]
        multiply = jax.jit(lambda a, b: a[0] @ b[0] if len(a) == 1 else a @ b)
        return lambda: [multiply(a, b) for a, b in pairs][-1]

    def _elementwise(self, model: ModelConfig, rows: int, queries: int, length: int) -> Program:
        dtype = model.compute_dtype
        hidden = [self._array(rows, queries, model.hidden_size, dtype=dtype) for _ in range(3)]
        wide = self._array(rows, queries, model.intermediate_size, dtype=dtype)
        scores = self._array(rows, model.num_heads, queries, length)
        norm, key = LayerNorm(model.hidden_size, model.norm_epsilon), DropoutKey(jnp.uint32(1), jnp.arange(rows))

        def work(hidden: list[Array], wide: Array, scores: Array) -> tuple[Array, ...]:
            residual, attended, output = hidden
            first = norm(residual + dropout(attended, model.hidden_dropout, key.fold_in(1)))
            second = norm(first + dropout(output, model.hidden_dropout, key.fold_in(2)))
            probabilities = dropout(jax.nn.softmax(scores), model.attention_dropout, key.fold_in(3))
            return second, ACTIVATIONS[model.activation](wide), probabilities.astype(dtype)

        return _forward_and_backward(work, hidden, wide, scores)

    def _loss(self, model: ModelConfig, targets: int) -> Program:
        labels = jnp.zeros((targets,), jnp.int32)
        logits = self._array(targets, model.vocab_size)
        return _forward_and_backward(lambda x: label_log_likelihoods(x, labels)[0], logits)

    def _update(self, parameters: int) -> Program:
        """AdamW: reads 16 bytes per parameter and writes 12."""
        state = [self._array(parameters) for _ in range(3)]
        gradient = self._array(parameters)

        def update(params: Array, mean: Array, square: Array, gradient: Array) -> tuple[Array, ...]:
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient * gradient
            return params - 1e-8 * (mean / (jnp.sqrt(square) + 1e-6) + 0.01 * params), mean, square

        step = jax.jit(update, donate_argnums=(0, 1, 2))

        def call() -> Array:
            state[:] = step(*state, gradient)
            return state[0]

        return call


def _forward_and_backward(work: Callable[..., Any], *inputs: Any) -> Program:
    """A program that computes `work` and its gradients, with ones as gradients of the results."""

    @jax.jit
    def both(*inputs: Any) -> Any:
        results, backward = jax.vjp(work, *inputs)
        return results, backward(jax.tree.map(jnp.ones_like, results))

    return lambda: both(*inputs)


def layer_products(model: ModelConfig, rows: int, queries: int, length: int) -> list[tuple[int, int, int, int]]:
    """(count, m, k, n) of the products of a layer of BERT, forward and backward.

    Args:
      model: of the BERT family, not gated.
      rows: of the batch.
      queries: positions of a row that the layer computes; keys and values are computed for all.
      length: of a row.
    """
    inner, width, size = model.num_heads * model.size_per_head, model.hidden_size, model.size_per_head
    found: list[tuple[int, int, int, int]] = []
    for tokens, inputs, outputs in (
        (rows * queries, width, inner),
        (rows * length, width, 2 * inner),
        (rows * queries, inner, width),
        (rows * queries, width, model.intermediate_size),
        (rows * queries, model.intermediate_size, width),
    ):
        found += trained_products(tokens, inputs, outputs)
    heads = rows * model.num_heads
    # Scores, and the gradient of the probabilities; contexts and the gradient of queries; of keys and of values.
    found += 2 * [(heads, queries, size, length)] + 2 * [(heads, queries, length, size)]
    return found + 2 * [(heads, length, queries, size)]


def head_products(model: ModelConfig, targets: int) -> list[tuple[int, int, int, int]]:
    """(count, m, k, n) of the products of the MLM head, forward and backward."""
    width = model.embedding_width
    return [*trained_products(targets, model.hidden_size, width), *trained_products(targets, width, model.vocab_size)]


def trained_products(tokens: int, inputs: int, outputs: int) -> Iterator[tuple[int, int, int, int]]:
    """A product with a kernel, the gradient of its input, the gradient of the kernel."""
    yield 1, tokens, inputs, outputs
    yield 1, tokens, outputs, inputs
    yield 1, inputs, tokens, outputs
