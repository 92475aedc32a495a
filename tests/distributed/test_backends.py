"""libtpu, which the extra `plan` installs, is not loaded on machines without a TPU, where it prints errors."""

import jax
import pytest
from jax._src import xla_bridge

from bert_jax.cli import main as cli
from bert_jax.distributed import worker


@pytest.mark.parametrize(("platforms", "tried"), [(None, False), ("", False), ("tpu,cpu", True)])
def test_tpus_are_tried_only_where_jax_found_one(monkeypatch, platforms, tried):
    first = xla_bridge._backend_factories["tpu"]
    monkeypatch.setattr(xla_bridge, "_backend_factories", dict(xla_bridge._backend_factories))
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", platforms)
        worker.disable_absent_tpu_backend()
    finally:
        jax.config.update("jax_platforms", before)
    here = xla_bridge._backend_factories["tpu"]
    assert (here is first) == tried and (tried or (here.factory() is None and here.fail_quietly))


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
def test_every_command_with_devices_looks_first(monkeypatch, command):
    class Looked(BaseException):
        pass

    def look():
        raise Looked

    monkeypatch.setattr(worker, "disable_absent_tpu_backend", look)
    with pytest.raises(Looked):
        cli.main(command.split())
