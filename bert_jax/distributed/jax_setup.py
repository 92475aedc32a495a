"""Set up jax in a command before anything needs a device: backends, memory, compilation cache.

It imports nothing that computes or stores, so that the benchmark of the step runs with jax, flax and optax alone.
"""

import contextlib
import ctypes
import importlib.metadata
import os
import sys
from pathlib import Path

import jax
from jax.extend import backend

from bert_jax.command.stacks import ignore_requests

ACCELERATORS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
"""Device files of NVIDIA GPUs (/dev/dxg in Windows' Linux) and AMD GPUs, and of TPUs."""
CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
"""Packages of jax's CUDA backend."""
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of glibc's mallopt(3)."""


def prepare_training(compilation_cache: str | None) -> None:
    """Set up jax for a training command. Call it before anything needs a device.

    Args:
      compilation_cache: see `set_compilation_cache`.
    """
    ignore_requests()
    disable_absent_backends()
    set_compilation_cache(compilation_cache)
    keep_freed_memory()


def has_accelerator() -> bool:
    """Whether this machine has the device file of a GPU or TPU."""
    return any(Path(path).exists() for path in ACCELERATORS)


def cuda_plugin_versions() -> dict[str, str]:
    """Versions of the installed packages of jax's CUDA backend."""
    installed = {}
    for package in CUDA_PLUGINS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next allocation, unless there is an accelerator.

    On a CPU, XLA allocates the temporary buffers of a step anew in every step. By default glibc maps and unmaps them,
    and the kernel fills every page with zeros: 98,000 page faults and 15 % of the time of a step with 23 million
    parameters (docs/log/finetuning.md, 2026-11-23). The process keeps its peak memory until it ends. Threads that exist
    already keep their own arenas, so this comes before jax creates its threads. Other C libraries are left alone.
    """
    if not has_accelerator() and sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
            libc.mallopt(parameter, value)


def set_compilation_cache(directory: str | None) -> None:
    """Set where jax keeps compiled programs for the next start.

    Args:
      directory: "none" turns the cache off; None: the directory in the environment, else one in the user's cache
        directory.
    """
    if directory is None and jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME")
        directory = str((Path(base) if base else Path.home() / ".cache") / "bert_jax" / "compiled")
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", None if directory == "none" else directory)


def end_on_sigterm() -> None:
    """Let SIGTERM end a command of several processes that saves nothing; by default jax catches it for `stop_request`.

    Call it before `worker.connect_worker`.
    """
    jax.config.update("jax_enable_preemption_service", False)


def disable_absent_backends() -> None:
    """Disable jax's backends of devices that this machine does not have: they would print errors.

    libtpu and the CUDA backend, which the extras `plan` and `plan-gpu` install, compile for absent devices without a
    backend (planning/topologies.py). Call it before anything needs a device. If a TPU is attached, jax sets its
    platforms at import; users set them with JAX_PLATFORMS.
    """
    if not jax.config.jax_platforms:
        backend.register_backend_factory("tpu", lambda: None)  # None: no devices
        if cuda_plugin_versions() and not has_accelerator():
            jax.config.update("jax_platforms", "cpu")
