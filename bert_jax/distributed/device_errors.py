"""Errors of the runtime while programs run: of devices and connections, which a restart can mend, and full memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from bert_jax.errors import DeviceOrConnectionError, UserError, causes

COMPILING = "while a program was compiled"
"""Note on errors of the compiler, which a restart would repeat."""
BUGS = ("INVALID_ARGUMENT", "UNIMPLEMENTED")
"""Beginnings of messages about what a restart would repeat."""
MAX_REASON = 300
"""Characters of the runtime's message."""


def compile_program(traced: jax.stages.Traced) -> Any:
    """Compile a program; errors of the runtime get the note `COMPILING`."""
    try:
        return traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        error.add_note(COMPILING)
        raise


@contextmanager
def describing_device_errors(
    memory_advice: str = "lower --micro-batch, or set model.remat full or a larger mesh.fsdp",
) -> Iterator[None]:
    """Replace errors of the runtime, except bugs and those of the compiler.

    Orbax raises TimeoutError for any error of the runtime at its barriers, also when a peer has ended; they are
    replaced, too.

    Args:
      memory_advice: what helps if a device is out of memory.

    Raises:
      UserError: a device is out of memory.
      DeviceOrConnectionError: any other error of the runtime: of a device, or of a connection between processes.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, TimeoutError) as error:
        cause = next((one for one in causes(error) if isinstance(one, jax.errors.JaxRuntimeError)), None)
        reason = " ".join(str(cause).split())[:MAX_REASON]
        if cause is None or COMPILING in getattr(cause, "__notes__", ()) or reason.startswith(BUGS):
            raise
        if "RESOURCE_EXHAUSTED" in reason:
            raise UserError(f"a device is out of memory ({reason}): {memory_advice}") from error
        raise DeviceOrConnectionError(f"a device or a connection between processes failed ({reason})") from error
