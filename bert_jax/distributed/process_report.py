"""What a process is about to do, for comparison with its peers: settings, code, versions."""

import hashlib
import importlib.metadata
import os
import platform
import socket
from pathlib import Path
from typing import Any

from bert_jax.config import Config, flatten, to_dict
from bert_jax.distributed.rendezvous import Report

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain")


def make_report(config: Config, **asked: Any) -> Report:
    """Plain values.

    Args:
      config: of the run.
      asked: what else the command says.
    """
    return {
        "host": socket.gethostname(),
        "config": flatten(to_dict(config)) | {name: str(value) for name, value in asked.items()},
        "code": {"SHA-256 of bert_jax": code_hash()},
        "environment": {name: value for name, value in os.environ.items() if _decides(name)},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def _decides(variable: str) -> bool:
    """Whether an environment variable is part of what all processes must have alike."""
    own = ("PROCESS", "LOCAL", "COORDINATOR", "CACHE")
    return variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") or (
        variable.startswith("JAX_") and not any(word in variable for word in own)
    )


def code_hash() -> str:
    """Of all source files of this package, by name and content."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
