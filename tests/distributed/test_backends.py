"""libtpu, which the extra `plan` installs, is not loaded on machines without a TPU, where it would print errors."""

import jax
import pytest
from jax._src import xla_bridge

from bert_jax.cli import main as cli
from bert_jax.distributed import worker


@pytest.mark.parametrize(("platforms", "enabled"), [(None, False), ("", False), ("tpu,cpu", True)])
def test_the_tpu_backend_is_enabled_only_where_jax_found_a_tpu(monkeypatch, platforms, enabled):
    original = xla_bridge._backend_factories["tpu"]
    monkeypatch.setattr(xla_bridge, "_backend_factories", dict(xla_bridge._backend_factories))
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", platforms)
        worker.disable_absent_tpu_backend()
    finally:
        jax.config.update("jax_platforms", before)
    factory = xla_bridge._backend_factories["tpu"]
    assert (factory is original) == enabled
    assert enabled or (factory.factory() is None and factory.fail_quietly)


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
def test_every_command_with_devices_disables_an_absent_tpu_first(monkeypatch, command):
    class CalledError(BaseException):
        pass

    def disable():
        raise CalledError

    monkeypatch.setattr(worker, "disable_absent_tpu_backend", disable)
    with pytest.raises(CalledError):
        cli.main(command.split())
