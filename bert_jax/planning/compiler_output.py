"""The compiler's output for absent devices, cached.

jax's compilation cache writes such programs but cannot read them, and compilation takes minutes. Their text and sizes
are all that planning reads, so these are cached, in the same directory (`jax_compilation_cache_dir`).
"""

import gzip
import hashlib
import json
import os
import re
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np

from bert_jax.distributed.jax_setup import cuda_plugin_versions
from bert_jax.planning.topologies import DESCRIPTIONS
from bert_jax.storage.files import write_atomic


class CompilerOutput(NamedTuple):
    """A compiled program as text, or the reason why there is none. Bytes are per device."""

    argument_bytes: int = 0
    temporary_bytes: int = 0
    total_bytes: int = 0
    printed: str | None = None
    """With the compiler's estimates; None if XLA cannot print the program so."""
    dumped: str | None = None
    """The compiler's dump, which has all parts of the program but no estimates; None: not written."""
    machine_code: dict[str, str] | None = None
    """PTX of the kernels for GPUs, by file of the dump."""
    error: str | None = None
    """Message of a program that does not fit into the memory of a device."""


def cached_output(
    lowered: jax.stages.Lowered, devices: np.ndarray, options: Any, compile_step: Callable[[], CompilerOutput]
) -> CompilerOutput:
    """The output of ``compile_step()``, or of an earlier call for the same program, devices, options and compilers.

    Args:
      lowered: the program.
      devices: of the mesh.
      options: of the compiler.
      compile_step: compiles the program.
    """
    if jax.config.jax_compilation_cache_dir is None:
        return compile_step()
    # The repr of a TPU has its place and not its kind; the platform's version has libtpu's.
    described = [(repr(one), one.device_kind, one.client.platform_version) for one in devices.flat]
    key = _hash(lowered, described, options)
    path = Path(jax.config.jax_compilation_cache_dir) / f"absent-{key}.json.gz"
    try:
        return CompilerOutput(**json.loads(gzip.decompress(path.read_bytes())))
    except (OSError, EOFError, zlib.error, ValueError, TypeError):  # absent, or damaged: compiled again
        output = compile_step()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, gzip.compress(json.dumps(output._asdict()).encode(), compresslevel=1))
    except OSError as error:
        warnings.warn(f"the compiler's output is not kept for the next time: {error}", stacklevel=2)
    return output


def _hash(lowered: jax.stages.Lowered, *settings: Any) -> str:
    """Programs whose operations have other names differ: planning reads from them what a kernel is for."""
    # Without those of the Python functions that called jax, which do not change the program.
    names = sorted(set(re.findall(r'loc\("(jit\([^"]*)"\(', lowered.as_text(debug_info=True))))
    versions = jax.__version__, jaxlib.__version__, cuda_plugin_versions()
    gpus = {path.name: path.read_text() for path in DESCRIPTIONS.iterdir()}
    libtpu = os.environ.get("LIBTPU_INIT_ARGS")
    content = [lowered.as_text(), names, *settings, gpus, versions, libtpu, CompilerOutput._fields]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
