"""Hard-concrete gates of heads, trained on a task with a penalty on open gates.

Voita et al. (2019, arXiv:1905.09418, section 5) gate the heads of a trained model and train on; the distribution is
that of Louizos et al. (2018, arXiv:1712.01312). Shapes: L layers, N heads.
"""

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Float, Key
from bert_jax.config import Config
from bert_jax.finetune.finetuning_task import FineTuning
from bert_jax.finetune.seed_run import FinetuneRun
from bert_jax.interventions.pruning_masks import CONTEXT
from bert_jax.model.activations import Edit
from bert_jax.model.dropout import DropoutKey, hash_combine
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import Batch
from bert_jax.training.state import InitialParams
from bert_jax.training.task import Params

TEMPERATURE, LOW, HIGH = 0.33, -0.1, 1.1
"""Of the concrete distribution, and the interval to which it is stretched before it is clipped to [0, 1] (Voita et al.,
their code)."""
INITIAL_LOG_ALPHA = 2.0
"""Gates begin almost open, at 0.957: the model is trained already."""
GATE_SITE = 0x6A7E
ALL_BUT_GATES = (r"encoder/.*", r"task/.*")


def sample_gates(log_alpha: Float[Array, "L N"], uniform: Float[Array, "L N"]) -> Float[Array, "L N"]:
    """Gates in [0, 1] from uniform random numbers in (0, 1) (Louizos et al. 2018, equations 10 and 11)."""
    noise = jnp.log(uniform) - jnp.log1p(-uniform)
    return jnp.clip(jax.nn.sigmoid((noise + log_alpha) / TEMPERATURE) * (HIGH - LOW) + LOW, 0, 1)


def fixed_gates(log_alpha: Float[Array, "L N"]) -> Float[Array, "L N"]:
    """The gates of evaluation, without noise (Louizos et al. 2018, equation 13)."""
    return jnp.clip(jax.nn.sigmoid(log_alpha) * (HIGH - LOW) + LOW, 0, 1)


def open_probabilities(log_alpha: Float[Array, "L N"]) -> Float[Array, "L N"]:
    """The probability that a sampled gate is above 0; their sum is the expected L0 norm (equation 12)."""
    return jax.nn.sigmoid(log_alpha - TEMPERATURE * math.log(-LOW / HIGH))


def uniform_numbers(dropout_key: DropoutKey, shape: tuple[int, int]) -> Float[Array, "L N"]:
    """Numbers in (0, 1) that are equal for all rows and devices of a step."""
    bits = hash_combine(dropout_key.key, GATE_SITE, jnp.arange(math.prod(shape)))
    # 23 bits and a half: neither 0 nor 1 in float32.
    return (((bits >> 9).astype(jnp.float32) + 0.5) / 2**23).reshape(shape)


@dataclass(frozen=True)
class GatedFineTuning(FineTuning):
    """Fine-tuning with a gate on the context of each head; its parameters are ``gates/log_alpha``, [L, N].

    A step samples each gate once, for all examples. To the loss is added `penalty` times the expected number of open
    gates.
    """

    penalty: float = 0.0

    def init_params(self, key: Key[Array, ""]) -> Params:
        """New parameters of encoder, head and gates."""
        return with_gates(super().init_params(key), self.config)

    def loss_weight_sums(self, batch: Batch) -> dict[str, Float[Array, ""]]:
        """Number of labels, of both terms: the penalty does not depend on the examples."""
        weights = super().loss_weight_sums(batch)
        return weights | {"gate_penalty": weights["task_loss"]}

    def sums(self, params: Params, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, WeightedSum]:
        """As of fine-tuning, with the penalty and the expected number of open gates."""
        found = super().sums(params, batch, dropout_key)
        expected, weight = open_probabilities(params["gates"]["log_alpha"]).sum(), found["task_loss"].weight
        return found | {
            "gate_penalty": WeightedSum(self.penalty * expected * weight, weight),
            "expected_open_heads": WeightedSum(expected * weight, weight),
        }

    def _logits(self, params, batch, dropout_key, sum_over_devices, edits=None):
        log_alpha = params["gates"]["log_alpha"]
        gates = (
            fixed_gates(log_alpha)
            if dropout_key is None
            else sample_gates(log_alpha, uniform_numbers(dropout_key, log_alpha.shape))
        )
        model_params = {name: tree for name, tree in params.items() if name != "gates"}
        factor = {CONTEXT: Edit(factor=gates[:, None, None, :, None])}
        return super()._logits(model_params, batch, dropout_key, sum_over_devices, factor)


def with_gates(params: Params, config: Config) -> Params:
    """Parameters with gates that are almost open."""
    shape = config.model.num_layers, config.model.num_heads
    return params | {"gates": {"log_alpha": np.full(shape, INITIAL_LOG_ALPHA, np.float32)}}


class GateRun(FinetuneRun):
    """The training of gates, with the weights of the model or without, in a work directory."""

    def __init__(self, *arguments, penalty: float, gate_rate: float, train_weights: bool):
        """Packs the batches; compiles nothing yet.

        Args:
          *arguments: of `FinetuneRun`; the learning rate of the options is that of the weights.
          penalty: on each gate's probability to be open.
          gate_rate: peak learning rate of log alpha.
          train_weights: whether encoder and head are trained, too.
        """
        self.penalty, self.gate_rate, self.train_weights = penalty, gate_rate, train_weights
        super().__init__(*arguments)

    def make_config(self, rows: int, steps_per_epoch: int) -> Config:
        """As of fine-tuning, with a learning rate of the gates; their settings are part of the run's identity."""
        config = super().make_config(rows, steps_per_epoch)
        (phase,) = config.phases
        scale = self.gate_rate / phase.learning_rate if phase.learning_rate else 0.0
        flags = (f"--gate-penalty {self.penalty:g}", f"--gate-rate {self.gate_rate:g}")
        return dataclasses.replace(
            config,
            optimizer=dataclasses.replace(config.optimizer, learning_rate_scales=(("gates/log_alpha", scale),)),
            phases=(phase if self.train_weights else dataclasses.replace(phase, frozen=ALL_BUT_GATES),),
            finetune=dataclasses.replace(config.finetune, flags=(*config.finetune.flags, *flags)),
        )

    def make_task(self, *fields) -> GatedFineTuning:
        """The task with gates."""
        return GatedFineTuning(*fields, penalty=self.penalty)

    def initial_params(self) -> InitialParams:
        """Those of the model, with gates that are almost open."""
        return InitialParams(with_gates(super().initial_params().params, self.config), None)
