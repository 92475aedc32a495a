"""What bert_jax uses of jax's private modules; no other file of it does. Tested with the range of jax in setup.cfg.

None of it has a public interface (jax 0.10 to 0.11). `jax.experimental.multihost_utils` exchanges values through the
devices, which are busy or absent when the processes agree. `jax.distributed.initialize` detects a cluster, but only
while it connects, and the supervisors need the result before; afterwards it does not say where process 0 is. No
setting says which processes write the cache.
"""

import copy
from types import SimpleNamespace
from typing import Any

from jax._src import clusters, compiler, distributed


def key_value_store() -> Any:
    """The client of the store that process 0 holds, of a run whose processes are connected."""
    return distributed.global_state.client


def coordinator_host() -> str:
    """Name or address of the host of process 0, of a run whose processes are connected."""
    return distributed.global_state.coordinator_address.rpartition(":")[0].strip("[]")


def detect_cluster(timeout_seconds: int) -> tuple[str | None, int | None, int | None, list[int] | None]:
    """The coordinator's HOST:PORT, the number of processes, the index of this one and its devices; None: not found."""
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    return detect(None, None, None, None, None, timeout_seconds)


def keep_compiled_programs() -> None:
    """Let this process write compiled programs into the cache.

    jax does so in process 0 only, so hosts without a common disk would compile again at every start.
    """
    write, state = compiler._cache_write, copy.copy(distributed.global_state)
    state.process_id = 0

    def write_as_process_0(*arguments: Any) -> None:
        compiler.distributed = SimpleNamespace(global_state=state)
        try:
            write(*arguments)
        finally:
            compiler.distributed = distributed

    compiler._cache_write = write_as_process_0
