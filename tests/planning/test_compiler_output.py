"""The compiler's output for absent devices is read again for the same program, and for no other."""

from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.planning.compiler_output import CompilerOutput, cached_output


class Device(NamedTuple):
    """As libtpu's: the representation has no kind."""

    id: int
    device_kind: str = "TPU v5 lite"
    client: SimpleNamespace = SimpleNamespace(platform_version="1")

    def __repr__(self) -> str:
        return f"TpuDevice(id={self.id})"


def devices(*ones: Device) -> np.ndarray:
    array = np.empty(len(ones), object)
    array[:] = ones
    return array


DEVICES = devices(Device(0), Device(1))


def lowered(factor: float = 2.0, scope: str = "mlp") -> jax.stages.Lowered:
    def program(x):
        with jax.named_scope(scope):
            return x * factor

    return jax.jit(program).lower(jax.ShapeDtypeStruct((3,), jnp.float32))


@pytest.fixture
def directory(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "new" / "cache"))
    yield tmp_path / "new" / "cache"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    "output",
    [CompilerOutput(1, 2, 3, "HloModule é", "dump", {"f.ptx": "code"}), CompilerOutput(error="RESOURCE")],
)
def test_the_same_program_is_compiled_once(directory, output):
    compiler = Mock(return_value=output)
    assert [cached_output(lowered(), DEVICES, {}, compiler) for _ in range(2)] == [output] * 2
    assert compiler.call_count == 1 and len(list(directory.glob("absent-*"))) == 1


@pytest.mark.parametrize(
    "other",
    [
        (lowered(3.0), DEVICES, {}),
        (lowered(scope="attention"), DEVICES, {}),
        (lowered(), DEVICES[:1], {}),
        (lowered(), devices(Device(0, "TPU v6 lite"), Device(1, "TPU v6 lite")), {}),
        (lowered(), DEVICES, {"xla_gpu_autotune_level": 0}),
    ],
    ids=["program", "names", "devices", "kind", "options"],
)
def test_other_inputs_are_compiled(directory, other):
    compiler = Mock(return_value=CompilerOutput(printed="text"))
    for arguments in ((lowered(), DEVICES, {}), other):
        cached_output(*arguments, compiler)
    assert compiler.call_count == 2


@pytest.mark.parametrize(
    "damage",
    [lambda x: b"", lambda x: b"text", lambda x: x[:-9], lambda x: x[:10] + b"\xff" + x[11:]],
    ids=["empty", "text", "cut off", "a byte"],
)
def test_a_damaged_file_is_written_again(directory, damage):
    compiler = Mock(return_value=CompilerOutput(printed="text"))
    cached_output(lowered(), DEVICES, {}, compiler)
    (file,) = directory.glob("absent-*")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert cached_output(lowered(), DEVICES, {}, compiler).printed == "text"
    assert compiler.call_count == 2 and len(file.read_bytes()) == len(whole)


def test_without_a_directory(directory):
    """Nothing is kept; and where none can be made, the output is still returned."""
    compiler = Mock(return_value=CompilerOutput(printed="text"))
    directory.parent.write_text("a file")
    with pytest.warns(UserWarning, match="not kept for the next time"):
        assert cached_output(lowered(), DEVICES, {}, compiler).printed == "text"
    jax.config.update("jax_compilation_cache_dir", None)
    assert cached_output(lowered(), DEVICES, {}, compiler).printed == "text" and compiler.call_count == 2
