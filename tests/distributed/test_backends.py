"""What training commands set up before jax has devices.

libtpu and the CUDA backend, which the extras `plan` and `plan-gpu` install, are not used on machines without TPUs and
GPUs, where they would print errors; freed memory is kept.
"""

import os
import subprocess
import sys

import jax
import pytest
from jax._src import xla_bridge

from bert_jax.cli import main as cli
from bert_jax.distributed import jax_setup


@pytest.mark.parametrize(("platforms", "enabled"), [(None, False), ("", False), ("tpu,cpu", True)])
def test_the_tpu_backend_is_enabled_only_where_jax_found_a_tpu(monkeypatch, platforms, enabled):
    original = xla_bridge._backend_factories["tpu"]
    monkeypatch.setattr(xla_bridge, "_backend_factories", dict(xla_bridge._backend_factories))
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", platforms)
        jax_setup.disable_absent_backends()
    finally:
        jax.config.update("jax_platforms", before)
    factory = xla_bridge._backend_factories["tpu"]
    assert (factory is original) == enabled
    assert enabled or (factory.factory() is None and factory.fail_quietly)


@pytest.mark.parametrize(
    ("plugins", "files", "platforms"),
    [({"plugin": "1"}, (), "cpu"), ({"plugin": "1"}, ("/dev/null",), None), ({}, (), None)],
)
def test_the_cuda_backend_is_disabled_only_where_there_is_no_accelerator(monkeypatch, plugins, files, platforms):
    """Without CUDA's libraries, jax prints a traceback."""
    monkeypatch.setattr(xla_bridge, "_backend_factories", dict(xla_bridge._backend_factories))
    monkeypatch.setattr(jax_setup, "cuda_plugin_versions", lambda: plugins)
    monkeypatch.setattr(jax_setup, "ACCELERATORS", files)
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", None)
        jax_setup.disable_absent_backends()
        assert jax.config.jax_platforms == platforms
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    "command",
    [
        "pretrain bert_tiny --corpus none --workdir none",
        "doctor bert_tiny --corpus none",
        "evaluate none --corpus none",
        "fill-mask none text",
        "convert none none",
    ],
)
def test_every_command_with_devices_disables_absent_backends_first(monkeypatch, command):
    class CalledError(BaseException):
        pass

    def disable():
        raise CalledError

    monkeypatch.setattr(jax_setup, "disable_absent_backends", disable)
    with pytest.raises(CalledError):
        cli.main(command.split())


PAGE_FAULTS = """
import os, resource, signal, sys
import numpy as np
from bert_jax.distributed import jax_setup
jax_setup.ACCELERATORS = sys.argv[1:]
jax_setup.prepare_training("none")
os.kill(os.getpid(), signal.SIGUSR1)  # which asks for stacks, and ends nothing before there are some
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(2**26, np.uint8).fill(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_used_again_where_there_is_no_accelerator():
    def page_faults(*accelerators):
        command = [sys.executable, "-c", PAGE_FAULTS, *accelerators]
        environment = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"}
        return int(subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout)

    assert page_faults() < 200 < 2**26 // 4096 // 2 < page_faults("/dev/null")
