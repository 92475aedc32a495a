"""What every test runs under: annotations checked at run time, no silent rank promotion, the CPU, no network."""

import os
import signal
from pathlib import Path

import jaxtyping
import pytest

from tests import typecheck

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell starts what it runs in the background with Ctrl-C ignored, and nohup ignores SIGHUP; tests of these signals,
# and the processes that they start, need them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Before anything imports bert_jax. Processes that a test starts are not checked.
PACKAGE = Path(__file__).parent.parent / "bert_jax"
jaxtyping.install_import_hook(typecheck.checked_modules(PACKAGE), f"{typecheck.__name__}.typecheck")

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

pytest_plugins = ["tests.fixtures"]


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Compiled programs of a finished module go: all of them together are more memory maps than Linux allows."""
    yield
    jax.clear_caches()


# Files are given to processes in this order. First what traces: once a process has loaded libtpu to compile for TPUs,
# the profiler ends it with SIGSEGV where there is no TPU (jax 0.10.2). Then what takes minutes.
FIRST = (
    "training/test_profile.py",
    "training/test_remote.py",
    "multi_device/test_equivalence.py",
    "training/test_recovery.py",
    "inference/test_embedding.py",
    "live/test_matrix.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of FIRST in their order; all others after them, in theirs."""
    places = {str(Path(__file__).parent / name): place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(str(item.path), len(FIRST)))
