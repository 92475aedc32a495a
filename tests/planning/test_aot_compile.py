"""Lowering of every preset's step for absent devices, and its memory on each of them."""

import dataclasses
import os

import jax
import pytest

from bert_jax import config as config_lib
from bert_jax.chips import Sizes
from bert_jax.config import MeshConfig, presets
from bert_jax.data.batches import TrainingStream
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import Cursor
from bert_jax.errors import UserError
from bert_jax.planning import aot_compile
from bert_jax.planning.hlo import Collective
from bert_jax.planning.roofline import CollectiveBytes
from bert_jax.planning.workload import count_parameters
from bert_jax.training.sharding import abstract_mesh, unsharded_dimensions

PRESETS = list(presets.preset_files())


def on(data: int, fsdp: int, tensor: int):
    return abstract_mesh(MeshConfig(data, fsdp, tensor), data * fsdp * tensor)


def batch_of(name: str) -> config_lib.Config:
    """The preset with batches that any small mesh can split; no other setting is changed."""
    config = presets.load_config(name)
    phases = [
        dataclasses.replace(phase, batch_size=64, accumulation=2, start_batch_size=None, ramp_steps=0)
        for phase in config.phases
    ]
    return dataclasses.replace(config, phases=tuple(phases))


def one_of_each_structure() -> list[str]:
    """Presets whose programs differ in more than sizes."""
    structures = {}
    for name in PRESETS:
        config = presets.load_config(name)
        model, objective = config.model, dataclasses.replace(config.objective, mask_rate=0.15)
        kind = model.feed_forward, model.positions, model.parameter_groups, model.attention, model.compute_dtype
        structures.setdefault((kind, config.optimizer.name, objective, config.data.format), name)
    return list(structures.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_each_structure())
def test_presets_lower(name):
    """The step of the last phase of the preset, on as many devices as its batch allows, up to 256."""
    config = presets.load_config(name)
    i, phase = len(config.phases) - 1, config.phases[-1]
    devices = next(n for n in (256, 64, 16, 8, 4, 2, 1) if phase.batch_size_at(0) % n == 0)
    traced = aot_compile.trace_step(config, i, abstract_mesh(MeshConfig(), devices), phase.fewest_micro_batches)
    for platform in ("cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert f"mhlo.num_partitions = {devices} " in text and "sdy.manual_computation" in text
    assert "stablehlo.all_gather" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"), [("bert_tiny", (2, 2, 2)), ("albert_base", (1, 8, 1)), ("modern_base", (2, 2, 2))]
)
def test_sensible_meshes_lower(name, sizes):
    config, mesh = batch_of(name), on(*sizes)
    text = aot_compile.trace_step(config, len(config.phases) - 1, mesh, 2).lower(lowering_platforms=("tpu",)).as_text()
    for axis, size in zip(("data", "fsdp", "tensor"), sizes, strict=True):
        assert f'"{axis}"={size}' in text
    assert "stablehlo.all_gather" in text


@pytest.mark.parametrize("name", PRESETS)
def test_fsdp_divides_parameters_and_moments(name):
    """To within 5 %: norms and biases are replicated. In bert_tiny, the 30,522 vocabulary biases alone, which 8 does
    not divide, are 4.8 % of a shard.
    """
    config = presets.load_config(name)
    model, pair = config.model, config.objective.pair != "none"
    total, share = (count_parameters(model, pair, sizes).owned for sizes in (Sizes(), Sizes(fsdp=8)))
    bound = 1.06 if name == "bert_tiny" else 1.05
    assert total / 8 <= share <= bound * total / 8
    assert count_parameters(model, pair, Sizes(data=8)).owned == total, "the data axis divides nothing"


def test_parameters_that_an_axis_does_not_divide():
    config = presets.load_config("bert_base")
    for sizes, expected in (((1, 8, 1), []), ((1, 1, 2), []), ((2, 1, 4), ["encoder/embeddings/word", "mlm/bias"])):
        state = aot_compile.Programs(aot_compile.compile_only_task(config), on(*sizes)).step_arguments(0)[0]
        found = unsharded_dimensions(state.params)
        assert [one.path for one in found] == expected
    word = found[0]
    assert (word.dimension, word.size, word.axis, word.bytes) == (0, 30522, "tensor", 4 * 30522 * 768)


@pytest.mark.parametrize("data", [{}, {"examples_per_row": 1, "format": "full_sentences"}])
def test_an_abstract_batch_matches_a_real_one(tiny_corpus, special_ids, two_phases, data):
    config = config_lib.replace(two_phases, data=data, objective={"pair": "none"} if data else {})
    stream = TrainingStream([Corpus.open(tiny_corpus)], [1.0], config, special_ids)
    phases = {}
    for one in stream.read(Cursor()):
        phases.setdefault(config.locate_step(one.next_cursor.step - 1)[0], one.rows)
    assert len(phases) == 2
    for phase, rows in phases.items():
        _, expected, _ = aot_compile.Programs(aot_compile.compile_only_task(config), on(1, 1, 1)).step_arguments(phase)
        assert {k: (v.shape, v.dtype) for k, v in rows.items()} == {k: (v.shape, v.dtype) for k, v in expected.items()}


def test_out_of_memory_messages_are_parsed():
    early = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    early += "temporaries (24.50G) exceeds available HBM (15.75G). HLO module: jit_train_step."
    late = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.25G of 15.75G hbm. Exceeded by 1.50G."
    small = late.replace("17.25G", "16896M")
    g = 2**30
    assert aot_compile.parse_out_of_memory(early) == (24.5 * g, 15.75 * g, False)
    assert aot_compile.parse_out_of_memory(late) == (17.25 * g, 15.75 * g, True)
    assert aot_compile.parse_out_of_memory(small) == (16.5 * g, 15.75 * g, True)
    with pytest.raises(ValueError, match="unknown out-of-memory"):
        aot_compile.parse_out_of_memory("RESOURCE_EXHAUSTED: too much")


def test_bytes_by_axis():
    """Groups over one axis, over two axes, and between slices."""

    def collective(kind, group, executions=1):
        return Collective(kind, (), 1000, executions, group)

    sizes = Sizes(data=4, fsdp=2, tensor=2, slices=2)  # a slice is 2 x 2 x 2
    found = [
        collective("all-reduce", (0, 1), executions=3),
        collective("all-gather", (0, 2)),
        collective("reduce-scatter", (0, 4)),
        collective("all-reduce", (0, 2, 4, 6)),
        collective("send", ()),
        collective("all-reduce", (5,)),
    ]
    assert aot_compile.collective_bytes_per_device(found, sizes) == CollectiveBytes(
        data=500 + 1500, fsdp=500, tensor=3000, network=1000
    )


def test_meshes_over_slices():
    """fsdp and tensor stay within a slice."""
    assert abstract_mesh(MeshConfig(-1, 4, 2), 32, slices=4).shape == {"data": 4, "fsdp": 4, "tensor": 2}
    with pytest.raises(UserError, match="32 devices are in 4 slices"):
        abstract_mesh(MeshConfig(2, 16, 1), 32, slices=4)


def test_settings_for_absent_devices_are_restored(monkeypatch):
    """The compilation cache; XLA_FLAGS, which libtpu must not see; and the variables that it needs."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("TPU_MIN_LOG_LEVEL", "0")
    jax.local_devices(backend="cpu")
    before, environment = jax.config.jax_enable_compilation_cache, dict(os.environ)
    with aot_compile.compiling_for_absent_devices():
        assert not jax.config.jax_enable_compilation_cache and "XLA_FLAGS" not in os.environ
        assert (os.environ["TPU_WORKER_HOSTNAMES"], os.environ["TPU_MIN_LOG_LEVEL"]) == ("localhost", "0")
    assert jax.config.jax_enable_compilation_cache == before and dict(os.environ) == environment
