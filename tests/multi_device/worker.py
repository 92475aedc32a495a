"""Trains one small model on several meshes of 8 fake CPU devices; prints the results as JSON."""

import dataclasses
import gc
import json
import math
import os
import sys
from collections.abc import Callable

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"  # of LLVM, not of HLO

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.compress.matches import RECIPES
from bert_jax.config import Config, MeshConfig, ObjectiveConfig, OptimizerConfig, Phase
from bert_jax.finetune import finetuning_task
from bert_jax.inference import loaded_model
from bert_jax.model import bert, families
from bert_jax.model.heads import Heads
from bert_jax.objectives.masking import Vocabulary
from bert_jax.tokenizers.tokenizer import wordpiece
from bert_jax.training.param_paths import name_leaves
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs, put_step_inputs
from bert_jax.training.sharding import make_mesh, put_rows, sum_over_devices
from tests.compress import test_corpus_task
from tests.compress.distillation import make_distillation, make_state
from tests.finetune import tiny_task
from tests.finetune.tiny_task import with_cls_norm
from tests.multi_device.exchanges import lower_naive

VOCAB, SEQ_LEN = 512, 32
ACCUMULATION = 4
ROWS, RAMP_ROWS = 8 * ACCUMULATION, 24
PHASE = Phase(steps=100, seq_len=SEQ_LEN, batch_size=ROWS, warmup_steps=0)
LAMB, MUON = {"optimizer": "lamb", "dense_dtype": "int8"}, {"optimizer": "muon", "token": "rtd"}
CASES = {
    # name: (data, fsdp, tensor, accumulation, steps, arguments of `make_task`)
    "one": (1, 1, 1, 1, 10, {}),
    "data8": (8, 1, 1, ACCUMULATION, 10, {}),
    "fsdp8": (1, 8, 1, ACCUMULATION, 10, {}),
    "cube": (2, 2, 2, ACCUMULATION, 10, {}),
    "one, lamb, int8": (1, 1, 1, 1, 3, LAMB),
    "cube, lamb, int8": (2, 2, 2, 1, 3, LAMB),
    "one, muon, rtd": (1, 1, 1, 1, 3, MUON),
    "cube, muon, rtd": (2, 2, 2, ACCUMULATION, 3, MUON),
}


def rows_of_step(step: int) -> dict[str, np.ndarray]:
    """Rows of very different lengths, so that micro-batches mask different numbers of tokens, whether a device takes
    neighbouring rows or every eighth one.
    """
    random = np.random.default_rng(step)
    block, within = np.divmod(np.arange(ROWS), ACCUMULATION)
    lengths = SEQ_LEN - 2 * block - 2 * within
    real = np.arange(SEQ_LEN)[None, :] < lengths[:, None]
    # Half of all tokens are one of four, so that the loss falls in 20 steps.
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


RTD = ObjectiveConfig(token="rtd", pair="none", mask_token_share=0.85, random_token_share=0.0)


def make_task(
    mesh: MeshConfig, optimizer: str = "adamw", dense_dtype: str = "compute", token: str = "mlm", **phase: int
) -> Pretraining:
    model = families.bert(num_layers=2, hidden_size=128, vocab_size=VOCAB, dense_dtype=dense_dtype)
    config = Config(
        name="equivalence",
        model=dataclasses.replace(model, intermediate_size=256, max_positions=SEQ_LEN),
        phases=(dataclasses.replace(PHASE, **phase),),
        mesh=mesh,
        optimizer=OptimizerConfig(name=optimizer),
        objective=RTD if token == "rtd" else ObjectiveConfig(),
    )
    assert config.model.hidden_dropout == config.model.attention_dropout == 0.1
    return Pretraining(config, Vocabulary(VOCAB, 4, (0, 1, 2, 3, 4)))


def run(
    data: int, fsdp: int, tensor: int, accumulation: int, steps: int, settings: dict[str, str]
) -> tuple[dict, dict[str, np.ndarray]]:
    task = make_task(MeshConfig(data, fsdp, tensor), **settings)
    mesh = make_mesh(task.config.mesh, jax.devices()[: data * fsdp * tensor])
    programs, inputs = Programs(task, mesh), put_step_inputs(3e-3, 1, task.config.seed, mesh)
    state, compiled = programs.init_state(), programs.train_step(0, accumulation)
    losses, norms, first_moments, replaced = [], {}, {}, []
    for step in range(steps):
        rows = put_rows(rows_of_step(step), mesh, ROWS)
        state, metrics = compiled(state, rows, inputs)
        losses.append(float(metrics["loss"]))
        replaced.append(float(metrics.get("rtd_replaced", 0.0)))
        if step == 0:  # after one step the first moment is a tenth of the clipped gradient
            norms = {name: float(value) for name, value in metrics.items() if "norm" in name or "ratio" in name}
            moments = name_leaves(jax.device_get(state.optimizer))
            first_moments = {
                name: np.asarray(value) for name, value in moments.items() if name.startswith(("mu/", "momentum/"))
            }
    word = state.params["encoder"]["embeddings"]["word"]
    kernel = state.params["encoder"]["layers"]["up"]["kernel"]
    per_device = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((state.params, state.optimizer))
    )
    facts = {
        "losses": losses,
        "norms": norms,
        "replaced": replaced,
        "hlo": compiled.as_text(),
        "word_shard": word.addressable_shards[0].data.shape,
        "up_shard": kernel.addressable_shards[0].data.shape,
        "bytes_per_device": per_device,
        "bytes_total": sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.optimizer))),
    }
    return facts, first_moments


def naive(data: int, fsdp: int, accumulation: int) -> str:
    """HLO of accumulation under automatic sharding: the mistake that the training step avoids (guarantee 2)."""
    task = make_task(MeshConfig(data, fsdp, 1))
    mesh = make_mesh(task.config.mesh, jax.devices()[: data * fsdp])
    params, rows = Programs(task, mesh).init_state().params, put_rows(rows_of_step(0), mesh, ROWS)
    return lower_naive(task, params, rows, accumulation).compile().as_text()


def masked_counts() -> dict[str, list[float]]:
    """Number of predicted tokens of each micro-batch of the first batch, on one device and on eight devices."""
    task = make_task(MeshConfig())
    batch = task.prepare(jax.tree.map(jnp.asarray, rows_of_step(0)), jnp.uint32(task.config.seed))
    of_rows = np.asarray(batch["target_weights"]).sum(1)
    return {
        "one": of_rows.reshape(ACCUMULATION, -1).sum(1).tolist(),
        "data8": of_rows.reshape(8, ACCUMULATION, -1).sum((0, 2)).tolist(),
    }


def one_step(task: Pretraining, accumulation: int, rows: dict, micro_batches: int) -> tuple[dict, dict, dict]:
    """Metrics, first moments, and the shards of the batch."""
    config = task.config
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.data * config.mesh.fsdp])
    batch = put_rows(rows, mesh, config.phases[0].batch_size)
    shards = {
        name: [np.asarray(shard.data).tolist() for shard in sorted(array.addressable_shards, key=lambda s: s.device.id)]
        for name, array in batch.items()
        if name in ("row", "segment_ids", "pair_labels", "example_id")
    }
    programs = Programs(task, mesh)
    state, metrics = programs.train_step(0, accumulation)(
        programs.init_state(), batch, put_step_inputs(3e-3, micro_batches, task.config.seed, mesh)
    )
    moments = {name: np.asarray(value) for name, value in name_leaves(jax.device_get(state.optimizer.mu)).items()}
    return {name: float(value) for name, value in metrics.items()}, moments, shards


def ramp() -> dict:
    """A step of 24 of 64 rows on 8 devices in a ramp-up phase, and a step of exactly 24 rows on one device."""
    rows = {name: array[:RAMP_ROWS] for name, array in rows_of_step(0).items()}
    rows["example_id"] = rows["row"][:, None] + 100
    exact = make_task(MeshConfig(1, 1, 1), batch_size=RAMP_ROWS)
    ramping = make_task(MeshConfig(2, 4, 1), start_batch_size=8, ramp_steps=80, accumulation=ACCUMULATION)
    expected, expected_moments, _ = one_step(exact, 1, rows, 1)
    ramped, moments, shards = one_step(ramping, ACCUMULATION, rows, RAMP_ROWS // 8)
    return {
        "expected": expected,
        "ramped": ramped,
        "gradient_distance": relative_distance(expected_moments, moments),
        "shards": shards,
        "tokens": int((rows["segment_ids"] > 0).sum()),
    }


def encoded() -> dict:
    """Vectors of texts whose rows are split over eight devices, and those of each text alone in a row."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    config = families.bert(num_layers=1, hidden_size=64, vocab_size=len(pieces))
    params = bert.init(config, jax.random.key(0), Heads())
    model = loaded_model.LoadedModel(config, Heads(), params, wordpiece(pieces, True, "worker.py"))
    texts = [" ".join("abcdefghij"[i % 7 : 8 + i % 3]) for i in range(100)]
    passes, one_pass = [], model._run_pass
    model._run_pass = lambda *arguments: passes.append(one_pass(*arguments)) or passes[-1]
    vectors, expected = model.encode(texts), model.forward(texts)
    real = expected.attention_mask[:, :, None]
    means = (expected.last_hidden_state * real).sum(1) / real.sum(1)
    return {
        "rows": [[shard.data.shape[0] for shard in vectors.addressable_shards] for vectors in passes],
        "difference": float(np.abs(vectors - means).max()),
        "size": float(np.abs(means).max()),
    }


MESHES = {"one": (1, 1, 1), "cube": (2, 2, 2)}


def batch_normalised() -> dict:
    """Fine-tuning with batch normalisation of [CLS] on one device and on eight, and with statistics of each device."""
    head, model = with_cls_norm("batch", mix=True), dataclasses.replace(tiny_task.MODEL, adapter_size=4)
    results, moments = {}, {}
    for name, sizes in (MESHES | {"control": (2, 2, 2)}).items():
        finetuning_task.sum_over_devices = (lambda x: x) if name == "control" else sum_over_devices
        programs = tiny_task.make_programs(tiny_task.make_task(head, model, MeshConfig(*sizes)), math.prod(sizes))
        state = programs.init_state()
        losses = []
        for step in range(3):
            state, metrics = tiny_task.take_step(programs, state, 3e-3)
            losses.append(metrics["loss"])
            if step == 0:
                moments[name] = tiny_task.arrays(state.optimizer.mu)
        params = tiny_task.arrays(state.params)
        results[name] = {
            "losses": losses,
            "mean": params["task/cls_norm/mean"].tolist(),
            "variance": params["task/cls_norm/variance"].tolist(),
            "gradient_distance": relative_distance(moments["one"], moments[name]),
        }
    return results


def on_meshes(train: Callable[[MeshConfig, int], tuple[dict, dict[str, np.ndarray]]]) -> dict:
    """Results of a function of a mesh and its number of devices, which also returns first moments."""
    results, moments = {}, {}
    for name, sizes in MESHES.items():
        results[name], moments[name] = train(MeshConfig(*sizes), math.prod(sizes))
        results[name]["gradient_distance"] = relative_distance(moments["one"], moments[name])
    return results


def distilled(mesh: MeshConfig, devices: int) -> tuple[dict, dict[str, np.ndarray]]:
    """Two steps with a teacher and a map."""
    narrow = dataclasses.replace(tiny_task.MODEL, hidden_size=8)
    task = make_distillation(RECIPES["tinybert"](4, 2, "to_teacher"), narrow, mesh=mesh)
    programs, state = make_state(task, devices)
    kernel = state.params["teacher"]["encoder"]["layers"]["up"]["kernel"]
    shard, losses, moments = list(kernel.sharding.shard_shape(kernel.shape)), [], []
    for _ in range(2):
        state, metrics = tiny_task.take_step(programs, state, 3e-3, tiny_task.first_batch(task.student))
        losses.append([metrics[one] for one in ("loss", "soft_loss", "scores_1_0_mse", "hidden_4_2_mse")])
        moments.append(tiny_task.arrays(state.optimizer.mu))
    return {"losses": losses, "teacher_shard": shard}, moments[0]


def replaced(mesh: MeshConfig, devices: int) -> tuple[dict, dict[str, np.ndarray]]:
    """A step with one of two modules replaced, with dropout."""
    dropout = dataclasses.replace(tiny_task.MODEL, hidden_dropout=0.1, attention_dropout=0.1)
    task = make_distillation(RECIPES["theseus"](4, 2, None), dropout, mesh=mesh)
    programs, state = make_state(task, devices)
    rows = tiny_task.first_batch(task.student)
    rows |= {"replaced": np.tile(np.array([1, 0], np.int32), (len(rows["row"]), 1))}
    state, metrics = tiny_task.take_step(programs, state, 3e-3, rows)
    return {"loss": metrics["loss"], "share": metrics["replaced_share"]}, tiny_task.arrays(state.optimizer.mu)


def distilled_on_a_corpus(mesh: MeshConfig, devices: int) -> tuple[dict, dict[str, np.ndarray]]:
    """A pretraining step with a teacher and a map."""
    narrow = dataclasses.replace(test_corpus_task.STUDENT, hidden_size=8)
    recipe = RECIPES["tinybert"](4, 2, "to_teacher")._replace(task_weight=1.0)
    programs, state = test_corpus_task.make_state(test_corpus_task.make_task(recipe, narrow, mesh), devices)
    state, metrics = test_corpus_task.take_step(programs, state, 3e-3)
    names = ("loss", "mlm_loss", "soft_loss", "scores_1_0_mse", "hidden_4_2_mse")
    return {"losses": [metrics[name] for name in names]}, tiny_task.arrays(state.optimizer.mu)


def relative_distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """|a - b| / |a| over all arrays together."""
    difference = sum(float(np.square(a[name] - b[name], dtype=np.float64).sum()) for name in a)
    return (difference / sum(float(np.square(x, dtype=np.float64).sum()) for x in a.values())) ** 0.5


def main() -> None:
    gc.set_threshold(50_000, 20, 100)  # see tests/conftest.py
    results, moments = {}, {}
    for name, case in CASES.items():
        results[name], moments[name] = run(*case)
        reference = name.replace("cube", "one") if "," in name else "one"
        results[name]["gradient_distance"] = relative_distance(moments[reference], moments[name])
    controls = {"data8": naive(8, 1, ACCUMULATION), "fsdp8": naive(1, 8, 1)}
    # Results are equal up to rounding, and compilation takes half the time; the HLO of these programs is not read.
    jax.config.update("jax_disable_most_optimizations", True)
    others = {
        "masked_counts": masked_counts(),
        "ramp": ramp(),
        "encoded": encoded(),
        "batch_normalised": batch_normalised(),
        "distilled": on_meshes(distilled),
        "replaced": on_meshes(replaced),
        "corpus": on_meshes(distilled_on_a_corpus),
    }
    json.dump({"cases": results, "controls": controls, **others}, sys.stdout)


if __name__ == "__main__":
    main()
