"""Trains one small model on many meshes of 8 fake CPU devices; prints what happened as JSON.

Run by test_equivalence.py in a process of its own, because the number of devices is fixed when jax starts.
"""

import dataclasses
import json
import os
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import Config, MeshConfig, OptimizerConfig, Phase
from bert_jax.masking import Vocabulary
from bert_jax.model import families
from bert_jax.training.paths import name_leaves
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.sharding import make_mesh, put_rows
from bert_jax.training.state import init_state
from bert_jax.training.step import make_train_step, put_dials

VOCAB, SEQ_LEN, ROWS, STEPS = 512, 32, 32, 20
CASES = {
    # name: (data, fsdp, tensor, accumulation, optimizer)
    "one": (1, 1, 1, 1, "adamw"),
    "one/4": (1, 1, 1, 4, "adamw"),
    "data8": (8, 1, 1, 1, "adamw"),
    "data8/4": (8, 1, 1, 4, "adamw"),
    "fsdp8": (1, 8, 1, 1, "adamw"),
    "fsdp8/4": (1, 8, 1, 4, "adamw"),
    "cube": (2, 2, 2, 1, "adamw"),
    "cube/4": (2, 2, 2, 4, "adamw"),
    "lamb one": (1, 1, 1, 1, "lamb"),
    "lamb cube": (2, 2, 2, 1, "lamb"),
}


def rows_of_step(step: int) -> dict[str, np.ndarray]:
    """Rows of very different lengths, so that micro-batches mask different numbers of tokens."""
    random = np.random.default_rng(step)
    lengths = np.where(np.arange(ROWS) < ROWS // 2, SEQ_LEN, random.integers(6, 12, ROWS))
    real = np.arange(SEQ_LEN)[None, :] < lengths[:, None]
    # Half of all tokens are one of four: there is something to learn in 20 updates.
    ids = np.where(random.random((ROWS, SEQ_LEN)) < 0.5, random.integers(5, 9, (ROWS, SEQ_LEN)), 0)
    ids = np.where(ids > 0, ids, random.integers(5, VOCAB, (ROWS, SEQ_LEN)))
    ids[:, 0], ids[:, 4] = 2, 3
    zeros = np.zeros((ROWS, SEQ_LEN), np.int32)
    return {
        "input_ids": np.where(real, ids, 0).astype(np.int32),
        "token_type_ids": zeros + (np.arange(SEQ_LEN) > 4),
        "segment_ids": real.astype(np.int32),
        "position_ids": zeros + np.arange(SEQ_LEN, dtype=np.int32),
        "example_id": np.arange(ROWS, dtype=np.int32)[:, None] + step * ROWS,
        "pair_labels": random.integers(0, 2, (ROWS, 1)).astype(np.int32),
        "cls_positions": zeros[:, :1],
        "row": np.arange(ROWS, dtype=np.int32),
        "mask_epoch": zeros[:, 0],
    }


def make_task(optimizer: str, mesh: MeshConfig) -> Pretraining:
    model = families.bert(num_layers=2, hidden_size=128, vocab_size=VOCAB)
    config = Config(
        name="equivalence",
        model=dataclasses.replace(model, intermediate_size=256, max_positions=SEQ_LEN),
        phases=(Phase(steps=100, seq_len=SEQ_LEN, batch_size=ROWS, learning_rate=3e-3, warmup_steps=0),),
        optimizer=OptimizerConfig(name=optimizer),
        mesh=mesh,
    )
    assert config.model.hidden_dropout == config.model.attention_dropout == 0.1
    return Pretraining(config, Vocabulary(VOCAB, 4, (0, 1, 2, 3, 4)))


def run(data: int, fsdp: int, tensor: int, accumulation: int, optimizer: str) -> tuple[dict, dict[str, np.ndarray]]:
    task = make_task(optimizer, MeshConfig(data, fsdp, tensor))
    mesh = make_mesh(task.config.mesh, jax.devices()[: data * fsdp * tensor])
    state = init_state(task, mesh)
    rows = put_rows(rows_of_step(0), mesh, ROWS)
    dials = put_dials(3e-3, 1, mesh)
    compiled = make_train_step(task, mesh, accumulation).lower(state, rows, dials).compile()
    losses, first_moments = [], {}
    for step in range(STEPS):
        rows = put_rows(rows_of_step(step), mesh, ROWS)
        state, metrics = compiled(state, rows, dials)
        losses.append(float(metrics["loss"]))
        if step == 0:  # after one update the first moment is a tenth of the clipped gradient
            moments = name_leaves(jax.device_get(state.optimizer.mu))
            first_moments = {name: np.asarray(value) for name, value in moments.items()}
    word = state.params["encoder"]["embeddings"]["word"]
    kernel = state.params["encoder"]["layers"]["rise"]["kernel"]
    per_device = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((state.params, state.optimizer))
    )
    facts = {
        "losses": losses,
        "hlo": compiled.as_text(),
        "word_shard": word.addressable_shards[0].data.shape,
        "rise_shard": kernel.addressable_shards[0].data.shape,
        "bytes_per_device": per_device,
        "bytes_total": sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.optimizer))),
    }
    return facts, first_moments


def masked_counts_per_micro_batch() -> list[float]:
    """How many tokens each quarter of the first batch predicts."""
    task = make_task("adamw", MeshConfig())
    batch = task.prepare(jax.tree.map(jnp.asarray, rows_of_step(0)), evaluating=False)
    return [float(part.sum()) for part in batch["target_weights"].reshape(4, ROWS // 4, -1)]


def relative_distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """|a - b| / |a| over all arrays together."""
    difference = sum(float(np.square(a[name] - b[name], dtype=np.float64).sum()) for name in a)
    return (difference / sum(float(np.square(x, dtype=np.float64).sum()) for x in a.values())) ** 0.5


def main() -> None:
    results, moments = {}, {}
    for name, case in CASES.items():
        results[name], moments[name] = run(*case)
        reference = "lamb one" if name.startswith("lamb") else "one"
        results[name]["gradient_distance"] = relative_distance(moments[reference], moments[name])
    json.dump({"cases": results, "masked_counts": masked_counts_per_micro_batch()}, sys.stdout)


if __name__ == "__main__":
    main()
