"""How fast a run is, and against which ceiling."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.chips import chip_of


def peak_flops(devices: list[jax.Device]) -> float:
    """FLOP/s of all devices together: the published bf16 peak, or what a matrix product reaches here and now."""
    chip = chip_of(devices[0].device_kind)
    if chip is not None:
        return chip.peak_flops * len(devices)
    # CPU devices share one machine, whatever their number.
    return measured_matmul_flops()


def measured_matmul_flops(size: int = 1024, repeats: int = 5) -> float:
    """FLOP/s of a float32 product of two square matrices on the default device, the best of a few."""
    matrix = jax.device_put(np.ones((size, size), np.float32))
    jnp.matmul(matrix, matrix).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jnp.matmul(matrix, matrix).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
