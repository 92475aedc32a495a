"""Lowering of every preset's step for absent devices, and its memory on each of them."""

import os

import jax
import pytest

from bert_jax.chips import Sizes
from bert_jax.config import MeshConfig, presets
from bert_jax.planning import aot_compile
from bert_jax.planning.topologies import compiling_for_absent_devices
from bert_jax.planning.workload import count_parameters
from bert_jax.training.pretraining_task import model_spec
from bert_jax.training.sharding import abstract_mesh

PRESETS = list(presets.preset_files())


def one_of_each_structure() -> dict[str, tuple[int, int]]:
    """Presets whose models or losses differ in more than sizes, with mesh.fsdp and mesh.tensor."""
    structures = {}
    for name in ("bert_tiny", *PRESETS):
        config = presets.load_config(name)
        model, objective = config.model, config.objective
        kind = model.feed_forward, model.positions, model.parameter_groups, model.bottleneck_size, model.direction
        structures.setdefault((kind, objective.token, objective.mask_unit), name)
    splits = {"bert_tiny": (2, 2), "albert_base": (8, 1), "modern_base": (2, 2)}
    return {name: splits.get(name, (1, 1)) for name in structures.values()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "split"), one_of_each_structure().items())
def test_presets_lower(name, split):
    """The step of the last phase of the preset, on as many devices as its batch allows, up to 256."""
    config, (fsdp, tensor) = presets.load_config(name), split
    i, phase = len(config.phases) - 1, config.phases[-1]
    shards = next(n for n in (256, 64, 16, 8, 4, 2, 1) if phase.batch_size_at(0) % n == 0)
    mesh = abstract_mesh(MeshConfig(-1, fsdp, tensor), shards * tensor)
    traced = aot_compile.trace_step(config, i, mesh, phase.fewest_micro_batches)
    for platform in ("cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert f"mhlo.num_partitions = {shards * tensor} " in text and "sdy.manual_computation" in text
        assert all(f'"{axis}"={size}' in text for axis, size in mesh.shape.items())
        assert ("stablehlo.all_gather" in text) == (fsdp > 1)


@pytest.mark.parametrize("name", PRESETS)
def test_fsdp_divides_parameters_and_moments(name):
    """To within 5 %: norms and biases are replicated. In bert_tiny, the 30,522 vocabulary biases alone, which 8 does
    not divide, are 4.8 % of a shard; in electra_small, the discriminator's head is 3.7 %.
    """
    config = presets.load_config(name)
    spec = model_spec(config, -1)
    total, share = (count_parameters(spec, sizes).owned for sizes in (Sizes(), Sizes(fsdp=8)))
    bound = {"bert_tiny": 1.06, "electra_small": 1.08}.get(name, 1.05)
    assert total / 8 <= share <= bound * total / 8
    assert count_parameters(spec, Sizes(data=8)).owned == total, "the data axis divides nothing"


EARLY = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
EARLY += "temporaries (24.50G) exceeds available HBM (15.75G). HLO module: jit_train_step."
LATE = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.25G of 15.75G hbm. Exceeded by 1.50G."


def test_out_of_memory_messages_are_parsed():
    assert aot_compile.parse_out_of_memory(EARLY) == (24.5 * 2**30, False)
    assert aot_compile.parse_out_of_memory(LATE) == (17.25 * 2**30, True)
    assert aot_compile.parse_out_of_memory(LATE.replace("17.25G", "16896M")) == (16.5 * 2**30, True)
    with pytest.raises(ValueError, match="unknown out-of-memory"):
        aot_compile.parse_out_of_memory("RESOURCE_EXHAUSTED: too much")


def test_settings_for_absent_devices_are_restored(monkeypatch):
    """The compilation cache; XLA_FLAGS, which libtpu must not see; and the variables that it needs."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("TPU_MIN_LOG_LEVEL", "0")
    jax.local_devices(backend="cpu")
    before, environment = jax.config.jax_enable_compilation_cache, dict(os.environ)
    with compiling_for_absent_devices():
        assert not jax.config.jax_enable_compilation_cache and "XLA_FLAGS" not in os.environ
        assert (os.environ["TPU_WORKER_HOSTNAMES"], os.environ["TPU_MIN_LOG_LEVEL"]) == ("localhost", "0")
    assert jax.config.jax_enable_compilation_cache == before and dict(os.environ) == environment
