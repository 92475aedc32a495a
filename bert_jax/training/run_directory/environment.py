"""The environment of an attempt: versions and devices. It is recorded in goodput.jsonl, once per attempt."""

import collections
import functools
import platform

import jax

from bert_jax.provenance import package_versions


@functools.cache
def describe_environment() -> dict[str, str]:
    """Names and values: versions of Python and packages, the system, and the devices of the run."""
    kinds = collections.Counter(device.device_kind for device in jax.devices())
    return package_versions() | {
        "system": f"{platform.system()} {platform.machine()}",
        "devices": ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())),
        "processes": str(jax.process_count()),
    }
