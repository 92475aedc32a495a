"""One step of a small model on one device and on meshes of four fake CPU devices; prints JSON."""

import dataclasses
import gc
import json
import os
import re
import sys
from collections import Counter

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import MeshConfig
from bert_jax.objectives.masking import Vocabulary
from bert_jax.training import param_collectives
from bert_jax.training.param_collectives import reduce_gradients
from bert_jax.training.param_paths import LAYERS, name_leaves
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs, put_step_inputs
from bert_jax.training.sharding import (
    make_mesh,
    manual_specs,
    put_rows,
    replicated,
    state_shardings,
)
from tests.training import test_step_golden as golden

CASES = {
    # name: (data, fsdp, tensor, micro-batches, reduce_dtype[, compute_dtype])
    "one": (1, 1, 1, 1, "float32"),
    "bfloat16": (2, 2, 1, 1, "bfloat16"),
    "bfloat16 products": (2, 2, 1, 1, "float32", "bfloat16"),
    "bfloat16 products, gathered in float32": (2, 2, 1, 1, "float32", "bfloat16"),
}
LOWERED = {
    "float32": (2, 2, 1, 1, "float32"),
    "one, bfloat16": (1, 1, 1, 1, "bfloat16"),
    "bfloat16, tensor, 2 micro-batches": (2, 1, 2, 2, "bfloat16"),
    "bfloat16 products, tensor, 2 micro-batches": (1, 2, 2, 2, "float32", "bfloat16"),
}
"""Not compiled."""
COLLECTIVE = re.compile(r'"stablehlo\.(all_reduce|reduce_scatter|all_gather)"\(.*?\) -> tensor<(?:\d+x)*(\w+)>', re.S)


def make_programs(data: int, fsdp: int, tensor: int, reduce_dtype: str, compute_dtype: str = "float32") -> Programs:
    optimizer = dataclasses.replace(golden.BASE.optimizer, reduce_dtype=reduce_dtype)
    model = dataclasses.replace(golden.BASE.model, compute_dtype=compute_dtype)
    config = dataclasses.replace(golden.BASE, model=model, optimizer=optimizer, mesh=MeshConfig(data, fsdp, tensor))
    mesh = make_mesh(config.mesh, jax.devices()[: data * fsdp * tensor])
    return Programs(Pretraining(config, Vocabulary(64, 4, (0, 1, 2, 3, 4))), mesh)


def collective_types(programs: Programs, micro_batches: int) -> dict[str, int]:
    """Collectives of arrays in the lowered step, counted by kind and type; sums of metrics are scalars."""
    text = programs.trace_train_step(0, micro_batches).lower().as_text()
    found = COLLECTIVE.finditer(text)
    return Counter(f"{one[1]} {one[2]}" for one in found if "x" in one[0].rsplit("tensor<", 1)[1])


def first_moments(programs: Programs, micro_batches: int) -> dict[str, np.ndarray]:
    """A tenth of the gradient, clipped."""
    rows, scalars = golden.rows(), put_step_inputs(0.01, 1, golden.BASE.seed, programs.mesh)
    step = programs.train_step(0, micro_batches)
    state, _ = step(programs.init_state(), put_rows(rows, programs.mesh, golden.ROWS), scalars)
    return {name: np.asarray(x) for name, x in name_leaves(jax.device_get(state.optimizer.mu)).items()}


def distance(moments: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    squares = sum(float(np.square(moments[name] - x).sum()) for name, x in reference.items())
    return (squares / sum(float(np.square(x).sum()) for x in reference.values())) ** 0.5


def reduced(dtype: str | None) -> dict[str, np.ndarray]:
    """Gradients that differ between devices, summed by `reduce_gradients`; None: by plain sums of float32."""
    mesh = make_mesh(MeshConfig(2, 2, 1), jax.devices())
    shapes = {"layers": {"up": {"kernel": jnp.zeros((2, 8, 16)), "bias": jnp.zeros((2, 16))}}}
    shardings = state_shardings(mesh, shapes)

    def sums(x):
        first = jax.lax.axis_index("data") * 2 + jax.lax.axis_index("fsdp")
        gradients = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size, dtype=jnp.float32) + first).reshape(x.shape), x)
        if dtype is not None:
            return reduce_gradients(gradients, shardings, dtype)
        up = gradients["layers"]["up"]
        kernel = jax.lax.psum_scatter(up["kernel"], "fsdp", scatter_dimension=1, tiled=True)
        total = {"kernel": jax.lax.psum(kernel, "data"), "bias": jax.lax.psum(up["bias"], ("data", "fsdp"))}
        return {"layers": {"up": total}}

    specs = replicated(mesh).spec, manual_specs(shardings)
    of_devices = jax.shard_map(sums, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    return {name: np.asarray(x) for name, x in name_leaves(jax.jit(of_devices)(shapes)).items()}


def main() -> None:
    gc.set_threshold(50_000, 20, 100)  # see tests/conftest.py
    jax.config.update("jax_disable_most_optimizations", True)
    results, moments = {}, {}
    read_type = param_collectives.read_type
    for name, (data, fsdp, tensor, micro_batches, *dtypes) in (CASES | LOWERED).items():
        param_collectives.read_type = (lambda *_: "float32") if name.endswith("gathered in float32") else read_type
        programs = make_programs(data, fsdp, tensor, *dtypes)
        results[name] = {"collectives": collective_types(programs, micro_batches)}
        if name in CASES:
            moments[name] = first_moments(programs, micro_batches)
            results[name]["distance"] = distance(moments[name], moments["one"])
    control = moments["bfloat16 products, gathered in float32"]
    results["bfloat16 products"]["beside control"] = distance(moments["bfloat16 products"], control)
    kernels = [name for name in control if name.startswith(LAYERS) and name.endswith("/kernel")]
    plain = reduced(None)
    sums = {dtype: reduced(dtype) for dtype in ("float32", "bfloat16")}
    results["sums"] = {
        dtype: {"distance": distance(one, plain), "types": sorted({str(x.dtype) for x in one.values()})}
        for dtype, one in sums.items()
    }
    json.dump(results | {"parameters": len(control), "kernels": len(kernels)}, sys.stdout)


if __name__ == "__main__":
    main()
