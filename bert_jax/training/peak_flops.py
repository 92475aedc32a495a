"""Peak FLOP/s of the devices, for the model FLOPs utilisation (MFU)."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.chips import chip_of


def peak_flops(devices: list[jax.Device]) -> float:
    """FLOP/s of all devices together: the published bf16 peak, or a measured matrix product if the chip is unknown."""
    chip = chip_of(devices[0].device_kind)
    if chip is not None:
        return chip.peak_flops * len(devices)
    # CPU devices share one machine: their number does not matter.
    return measured_matmul_flops()


def measured_matmul_flops(size: int = 1024, repeats: int = 5) -> float:
    """FLOP/s of a float32 product of two square matrices on the default device, the best of `repeats`."""
    matrix = jax.device_put(np.ones((size, size), np.float32))
    jnp.matmul(matrix, matrix).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jnp.matmul(matrix, matrix).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
