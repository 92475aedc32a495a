"""How fast a run is, and against which ceiling."""

import time

import jax
import jax.numpy as jnp
import numpy as np

# Dense bf16 peaks per chip in TFLOP/s, from the makers' data sheets.
PEAK_TFLOPS = {
    "TPU v3": 123,
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5e": 197,
    "TPU v5p": 459,
    "TPU v5": 459,
    "TPU v6 lite": 918,
    "TPU v6e": 918,
    "NVIDIA A100": 312,
    "NVIDIA H100": 989,
    "NVIDIA H200": 989,
    "NVIDIA B200": 2250,
}


def peak_flops(devices: list[jax.Device]) -> float:
    """FLOP/s of all devices together: the published bf16 peak, or what a matrix product reaches here and now."""
    kind = devices[0].device_kind
    known = [tflops for name, tflops in PEAK_TFLOPS.items() if kind.startswith(name)]
    if known:
        return 1e12 * max(known) * len(devices)
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
