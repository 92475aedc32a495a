"""The programs of a run: its abstract state, initial state, train steps and evaluation steps, each made once.

A train step is ``train_step(state, batch, inputs) -> (state, metrics)``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from bert_jax.array_types import Array, Bool, Float, Int
from bert_jax.distributed.agreement import barrier
from bert_jax.distributed.device_errors import compile_program
from bert_jax.errors import UserError
from bert_jax.model.dropout import DropoutKey, hash_combine
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import Batch
from bert_jax.training.divergence import init_divergence_state, reset_for_phase, update_divergence_state
from bert_jax.training.optimizers.optimizer import Optimizer
from bert_jax.training.optimizers.param_rules import param_rules
from bert_jax.training.param_collectives import gather_parameters, gather_types, reduce_gradients
from bert_jax.training.param_paths import map_with_paths, name_leaves, path_name
from bert_jax.training.sharding import (
    manual_axes,
    manual_specs,
    put_equal,
    put_replicated,
    put_rows,
    replicated,
    round_up_to_shards,
    row_sharding,
    row_spec,
    state_shardings,
    sum_over_rows,
)
from bert_jax.training.state import InitialParams, TrainState, repeat_layers
from bert_jax.training.task import Params, Score, Task

T = TypeVar("T")
Metrics = dict[str, Float[Array, ""]]
DROPOUT_STREAM = 0x0D0


class StepInputs(NamedTuple):
    """Inputs that the host sets for each step without recompilation, replicated on the devices."""

    learning_rate: Any
    """Of this step, float32."""
    micro_batches: Any
    """Number of the batch's micro-batches that hold rows, int32; fewer than all only during a batch ramp."""
    seed: Any
    """Of the run, for masks and dropout, uint32: runs that differ only in their seed share a program."""
    mask_counts: Any = None
    """Predictions of this step by length of example, int32 [seq_len + 1]; None in a phase of constant mask rate, whose
    program contains them."""


def put_seed(seed: int, mesh: Mesh) -> Array:
    """The seed of a run, on the device; once per run, as a transfer takes 16 microseconds."""
    return put_replicated(np.asarray(seed, np.uint32), mesh)


def put_step_inputs(
    learning_rate: float,
    micro_batches: int,
    seed: int | Array,
    mesh: Mesh,
    mask_counts: Int[np.ndarray, " n"] | None = None,
) -> StepInputs:
    """The inputs of one step, on the device; `seed` may be there already (`put_seed`)."""
    rate, count = np.asarray(learning_rate, np.float32), np.asarray(micro_batches, np.int32)
    rate, count, mask_counts = put_replicated((rate, count, mask_counts), mesh)
    return StepInputs(rate, count, put_seed(seed, mesh) if isinstance(seed, int) else seed, mask_counts)


TrainStep = Callable[[TrainState, Batch, StepInputs], tuple[TrainState, Metrics]]


class Programs:
    """A task on a mesh, and what is compiled for it. Every program is made at its first use.

    `phase` is the index of a phase of the task's config. Phases that differ in their schedules only share programs. On
    an abstract mesh, steps can be traced and not compiled.
    """

    def __init__(self, task: Task, mesh: Mesh | AbstractMesh):
        """Compiles nothing yet."""
        self.task, self.mesh = task, mesh
        self._phases = [phase.without_schedule() for phase in task.config.phases]
        self._made: dict[Any, Any] = {}

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The result of the first ``make()`` for this key: a kind, a phase or another value, and further values.

        Subclasses can share results between runs.
        """
        kind, phase, *rest = key
        key = kind, self._phases[phase] if isinstance(phase, int) else phase, *rest
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def abstract_state(self, phase: int) -> TrainState:
        """Shapes, types and shardings of the state in a phase, without allocating it.

        Raises:
          UserError: a pattern of the config or of the phase matches no parameter.
        """

        def make() -> TrainState:
            shapes = jax.eval_shape(_initializer(self.task.in_phase(phase)), jax.random.key(0))
            shardings = state_shardings(self.mesh, shapes)
            return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)

        return self.once(("abstract state", phase), make)

    def init_state(self, phase: int = 0) -> TrainState:
        """A new state; each array is initialised in its sharding. The values are the same on every mesh."""
        initializer = self.once(
            ("initializer", phase),
            lambda: jax.jit(_initializer(self.task.in_phase(phase)), out_shardings=self._shardings(phase)),
        )
        return initializer(jax.random.key(self.task.config.seed))

    def state_from_initial(self, initial: InitialParams, phase: int = 0) -> TrainState:
        """A state at step 0 with given parameters and, if there are any, given moments."""
        shardings, source = self._shardings(phase), self.task.config.start.source
        params = put_equal(initial.params, shardings.params, source)
        state = jax.jit(_with_new_optimizer(self.task.in_phase(phase)), out_shardings=shardings)(params)
        if initial.optimizer_state is None:
            return state
        if not isinstance(state.optimizer, optax.ScaleByAdamState):
            name = self.task.config.optimizer.name
            raise UserError(f"start.optimizer_state keep: {name} has no moments of Adam: set start.optimizer_state new")
        count, mu, nu = initial.optimizer_state
        moments = state.optimizer._replace(count=np.asarray(count, np.int32), mu=mu, nu=nu)
        return dataclasses.replace(state, optimizer=put_equal(moments, shardings.optimizer, source))

    def enter_phase(self, state: TrainState, phase: int) -> TrainState:
        """The state at the beginning of a phase, from the state at the end of the phase before.

        Layers, and moments that are kept, are repeated up to the phase's depth; moments and the optimizer's step count
        are reset if the phase's config says so; the loss average is reset.
        """
        settings = self.task.config.phases[phase]
        abstract = self.abstract_state(phase)

        def enter(state: TrainState) -> TrainState:
            kept = repeat_layers(state, abstract)
            params, average = kept.params, kept.average
            new = task_optimizer(self.task.in_phase(phase)).init(params)
            optimizer = jax.tree_util.tree_map_with_path(choose, kept.optimizer, new)
            return TrainState(state.step, params, optimizer, reset_for_phase(state.divergence), average)

        def choose(path: tuple[Any, ...], kept: jax.Array, new: jax.Array) -> jax.Array:
            is_count = path_name(path).rpartition("/")[2] == "count"
            return new if (settings.step_count if is_count else settings.moments) == "reset" else kept

        program = self.once(("enter", phase), lambda: jax.jit(enter, out_shardings=self._shardings(phase)))
        return program(state)

    def step_arguments(self, phase: int, rows: int | None = None) -> tuple[TrainState, Batch, StepInputs]:
        """Shapes, types and shardings of the arguments of a phase's train step, for `batch_size` or fewer rows."""
        size = rows or self.task.config.phases[phase].batch_size
        by_rows, everywhere = row_sharding(self.mesh), replicated(self.mesh)
        batch = {
            name: jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype, sharding=by_rows)
            for name, array in self.task.in_phase(phase).blank_row().items()
        }
        shapes = [((), jnp.float32), ((), jnp.int32), ((), jnp.uint32)]
        if self.task.config.phases[phase].end_mask_rate is not None:
            shapes.append(((self.task.config.phases[phase].seq_len + 1,), jnp.int32))
        inputs = StepInputs(*(jax.ShapeDtypeStruct(*shape, sharding=everywhere) for shape in shapes))
        return self.abstract_state(phase), batch, inputs

    def trace_train_step(self, phase: int, accumulation: int, rows: int | None = None) -> jax.stages.Traced:
        """The traced train step of a phase, to lower for any platform (`make_train_step`)."""
        step = make_train_step(self.task.in_phase(phase), self.abstract_state(phase), accumulation)
        return step.trace(*self.step_arguments(phase, rows))

    def train_step(self, phase: int, accumulation: int, rows: int | None = None) -> TrainStep:
        """The compiled train step of a phase with this number of micro-batches, for `batch_size` or fewer rows."""
        return self.once(
            ("train step", phase, accumulation, rows),
            lambda: compile_program(self.trace_train_step(phase, accumulation, rows)),
        )

    def eval_step(self, phase: int) -> Callable[[Params, Batch], tuple[Batch, dict[str, WeightedSum]]]:
        """The jitted evaluation step for the depth of a phase (`make_eval_step`)."""
        return self.once(
            ("eval step", self.task.config.model_of(phase)),
            lambda: make_eval_step(self.task.in_phase(phase), self.abstract_state(phase).params),
        )

    def scorer(self, params: Params, phase: int) -> tuple[Score, int]:
        """A function that scores an evaluation batch with parameters on the mesh, which have the depth of a phase; and
        the rows of a batch.
        """
        rows = round_up_to_shards(self.task.config.evaluation.batch_size, self.mesh)

        def score(batch: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, WeightedSum]]:
            arrays = put_rows(batch, self.mesh, rows)
            return jax.device_get(self._eval_program(params, arrays, phase)(params, arrays))

        return score, rows

    def _eval_program(self, params: Params, batch: Batch, phase: int) -> Callable[[Params, Batch], Any]:
        """The compiled evaluation step for rows of these shapes; all processes have compiled it when this returns."""

        def make() -> Callable[[Params, Batch], Any]:
            program = compile_program(self.eval_step(phase).trace(params, batch))
            barrier("the first step of a program")  # its first collective gives a late process only 30 s (Gloo)
            return program

        shapes = tuple((name, x.shape, str(x.dtype)) for name, x in sorted(batch.items()))
        return self.once(("eval program", self.task.config.model_of(phase), shapes), make)

    def evaluate(self, params: Params, phase: int) -> dict[str, float]:
        """Held-out metrics of parameters on the mesh, which have the depth of a phase."""
        return self.task.in_phase(phase).evaluate(*self.scorer(params, phase))

    def _shardings(self, phase: int) -> TrainState:
        return jax.tree.map(lambda x: x.sharding, self.abstract_state(phase))


def _initializer(task: Task) -> Callable[[jax.Array], TrainState]:
    to_state = _with_new_optimizer(task)
    return lambda key: to_state(task.init_params(key))


def _with_new_optimizer(task: Task) -> Callable[[Params], TrainState]:
    optimizer, averaged = task_optimizer(task), task.config.optimizer.ema_decay is not None

    def to_state(params: Params) -> TrainState:
        # A copy, because the step donates each array of its state once.
        average = jax.tree.map(jnp.copy, params) if averaged else None
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), init_divergence_state(), average)

    return to_state


def task_optimizer(task: Task) -> Optimizer:
    """The optimizer of the task's config, in the task's phase."""
    config, params = task.config, jax.eval_shape(task.init_params, jax.random.key(0))
    frozen = config.phases[task.phase].frozen
    return Optimizer(config.optimizer, params, frozen, layers=config.log.layers)


def _next_average(state: TrainState, params: Params, decay: float | None, skipped: Bool[Array, ""]) -> Params | None:
    """The moving average after a step that makes `params`; the decay is that of TensorFlow's
    ExponentialMovingAverage with `num_updates`."""
    if decay is None:
        return None
    done = state.step.astype(jnp.float32)
    rate = jnp.where(skipped, 0.0, 1.0 - jnp.minimum(decay, (1 + done) / (10 + done)))
    return jax.tree.map(lambda average, new: average - rate * (average - new), state.average, params)


def make_train_step(task: Task, abstract: TrainState, accumulation: int) -> jax.stages.Wrapped:
    """The jitted train step of the task's phase. It donates the state: the argument must not be used again.

    Metrics, all global: the mean of each of the task's sums; `loss`; `tokens`, the number of tokens without padding;
    `learning_rate`; those of the optimizer (training/optimizers/optimizer.py); and those of divergence detection
    (`StepMeasures` of training/divergence.py), of which `skipped_steps` counts from the start of the run.

    If the loss or the gradient is not finite, parameters, moments and average stay unchanged, bit for bit.

    Args:
      task: the task in the phase to compile.
      abstract: shapes and shardings of the state in that phase. The data and fsdp axes of its mesh split the rows.
      accumulation: micro-batches per step. Each device splits its rows, and gradients cross devices once per step. In
        a phase with a batch ramp, `StepInputs.micro_batches` of them are computed, and the other rows are padding.
    """
    mesh, shardings = abstract.step.sharding.mesh, jax.tree.map(lambda x: x.sharding, abstract)
    optimizer = task_optimizer(task)
    stable_steps = task.config.recovery.stable_steps
    ramps = task.config.phases[task.phase].start_batch_size is not None

    def local_gradients(params: Params, step: Array, batch: Batch, inputs: StepInputs) -> tuple[Any, Metrics, Any]:
        counts = (inputs.micro_batches if ramps else accumulation), accumulation
        return _local_gradients(task, mesh, shardings.params, counts, params, step, inputs, batch)

    everywhere = replicated(mesh).spec
    gradients_of = jax.shard_map(
        local_gradients,
        mesh=mesh,
        in_specs=(manual_specs(shardings.params), everywhere, row_spec(), everywhere),
        out_specs=(manual_specs(shardings.params), everywhere, everywhere),
        axis_names=manual_axes(mesh),
        # With check_vma, jax would reduce the gradient of every replicated parameter inside
        # the backward pass, once per micro-batch; reduce_gradients does it once.
        check_vma=False,
    )

    def train_step(state: TrainState, batch: Batch, inputs: StepInputs) -> tuple[TrainState, Metrics]:
        gradients, metrics, new_values = gradients_of(state.params, state.step, batch, inputs)
        gradients = jax.lax.with_sharding_constraint(gradients, shardings.params)
        finite = jnp.isfinite(metrics["loss"])
        rate = inputs.learning_rate
        params, moments, norms = optimizer.update(gradients, state.optimizer, state.params, rate, finite)
        skipped = norms.pop("skipped") > 0
        if new_values:
            params = map_with_paths(lambda path, x: jnp.where(skipped, x, new_values.get(path, x)), params)
        divergence, measures = update_divergence_state(state.divergence, metrics["loss"], skipped, stable_steps)
        metrics |= norms | {"learning_rate": rate} | measures._asdict()
        average = _next_average(state, params, task.config.optimizer.ema_decay, skipped)
        return TrainState(state.step + 1, params, moments, divergence, average), metrics

    return jax.jit(
        train_step,
        in_shardings=(shardings, row_sharding(mesh), replicated(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def _local_gradients(
    task: Task,
    mesh: Mesh | AbstractMesh,
    shardings: Any,
    micro_batches: tuple[Array | int, int],
    param_shards: Params,
    step: Array,
    inputs: StepInputs,
    batch: Batch,
) -> tuple[Any, Metrics, dict[str, Array]]:
    """Gradient of the global loss from this device's rows, reduced over devices at the end; metrics; and new values of
    parameters that are not trained, by path (`Task.sums`).

    `micro_batches` are (how many to compute, how many the rows are split into).
    """
    params = gather_parameters(param_shards, shardings, gather_types(param_shards, task.config.model))
    batch = task.prepare(batch, inputs.seed, inputs.mask_counts)
    weights = sum_over_rows(task.loss_weight_sums(batch), mesh)
    key = hash_combine(inputs.seed, DROPOUT_STREAM, step)
    rules = param_rules(params, frozen=task.config.phases[task.phase].frozen)

    def micro_loss(params: Params, rows: Batch) -> tuple[Array, dict[str, WeightedSum]]:
        # Frozen parameters need no backward pass.
        params = jax.tree.map(lambda x, rule: jax.lax.stop_gradient(x) if rule.frozen else x, params, rules)
        sums = task.sums(params, rows, DropoutKey(key, rows["row"]))
        return combine(sums, weights), sums

    def micro_step(rows: Batch) -> tuple[Params, dict[str, WeightedSum]]:
        (_, sums), gradients = jax.value_and_grad(micro_loss, has_aux=True)(params, rows)
        return gradients, sums

    if micro_batches[1] == 1:  # no accumulators needed
        gradients, sums = micro_step(batch)
    else:
        gradients, sums = _accumulate(micro_step, batch, *micro_batches)
    sums = sum_over_rows(sums, mesh)
    tokens = sum_over_rows((batch["segment_ids"] > 0).sum(), mesh)
    metrics = _means(sums) | {"loss": combine(sums, weights), "tokens": tokens}
    new_values = {name: metrics.pop(name) for name in sorted(metrics.keys() & name_leaves(params).keys())}
    gradients = reduce_gradients(gradients, shardings, task.config.optimizer.reduce_dtype)
    return gradients, metrics, new_values


def _accumulate(micro_step: Callable[[Batch], Any], batch: Batch, micro_batches: Array | int, accumulation: int) -> Any:
    """Sum of ``micro_step`` over the first `micro_batches` of `accumulation` equal parts of the rows, one at a time."""
    parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
    shapes = jax.eval_shape(micro_step, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(index: Array, sums: Any) -> Any:
        rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), parts)
        return jax.tree.map(jnp.add, sums, micro_step(rows))

    return jax.lax.fori_loop(0, micro_batches, add, zeros)


def combine(sums: dict[str, WeightedSum], weights: dict[str, Float[Array, ""]]) -> Float[Array, ""]:
    """The loss: the sum over terms of total / global weight. A term of weight 0 counts as 0."""
    return sum(sums[name].sum / jnp.where(weight > 0, weight, 1.0) for name, weight in weights.items())


def _means(sums: dict[str, WeightedSum]) -> dict[str, Float[Array, "..."]]:
    """Mean of every summed quantity: total / weight."""
    return {name: value.sum / jnp.maximum(value.weight, 1.0) for name, value in sums.items()}


def make_eval_step(
    task: Task, abstract_params: Params
) -> Callable[[Params, Batch], tuple[Batch, dict[str, WeightedSum]]]:
    """The jitted evaluation step: the scored rows of a batch and their global sums (`Task.score`)."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_params)
    mesh = jax.tree.leaves(shardings)[0].mesh

    def eval_step(params: Params, batch: Batch) -> tuple[Batch, dict[str, WeightedSum]]:
        return task.score(params, task.prepare(batch, None))

    return jax.jit(eval_step, in_shardings=(shardings, row_sharding(mesh)), out_shardings=replicated(mesh))
