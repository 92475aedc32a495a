"""What every test runs under: annotations checked at run time, no silent rank promotion, the CPU, no network."""

import gc
import os
import signal
import time
from pathlib import Path

import jaxtyping
import pytest

from tests import typecheck
from tests.cpu_time import CpuTime

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
# jax allocates as it traces: with the default of 700, collections took 9 % of a page's CPU seconds
# (docs/log/project.md, 2026-11-28).
gc.set_threshold(50_000, 20, 100)

pytest_plugins = ["tests.fixtures"]


class CutOff:
    """A plugin of pytest for a machine that ends a run after a fixed time, whatever it has found by then.

    A failed test is named at once. With `BERT_JAX_TEST_DEADLINE`, in seconds of the Unix clock, tests that have not
    begun by then are skipped and counted, and the run fails.
    """

    REASON = "the deadline has passed"

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.deadline = float(os.environ.get("BERT_JAX_TEST_DEADLINE", "inf"))
        self.late = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Before fixtures are made."""
        if time.time() > self.deadline:
            pytest.skip(self.REASON)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called where reports are printed, and in the processes of pytest-xdist, which print nothing."""
        self.late += report.skipped and self.REASON in str(report.longrepr)
        if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
            terminal = self.config.pluginmanager.getplugin("terminalreporter")
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A run that is not complete does not pass."""
        if self.late:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the number of tests that were not run."""
        if self.late:
            terminalreporter.write_line(f"NOT RUN: {self.late} tests, since {self.REASON} (BERT_JAX_TEST_DEADLINE)")


def pytest_configure(config: pytest.Config) -> None:
    """Measure the CPU seconds of packages, and be ready to be cut off."""
    config.pluginmanager.register(CpuTime())
    config.pluginmanager.register(CutOff(config))


@pytest.fixture(autouse=True, scope="module")
def clean_process():
    """Free the compiled programs of a module: all together need more memory maps than Linux allows."""
    yield
    jax.clear_caches()


# Files that take minutes come first, longest first, so that no process is busy alone at the end. Compilation for TPUs
# comes last: once a process has loaded libtpu, jax's profiler ends it with SIGSEGV where there is no TPU (jax 0.10.2).
FIRST = (
    "test_docs.py",
    "multi_process/test_supervised.py",
    "docs/test_training_pages.py",
    "docs/test_tool_pages.py",
    "multi_process/test_stream.py",
    "multi_device/test_equivalence.py",
    "training/test_remote.py",
    "launchers/test_slurm.py",
    "training/test_resume.py",
    "live/test_matrix.py",
)
LAST = ("planning",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by FIRST and LAST; pytest-xdist gives them to processes in this order."""

    def rank(item: pytest.Item) -> int:
        path = item.path.relative_to(Path(__file__).parent)
        if path.as_posix() in FIRST:
            return FIRST.index(path.as_posix())
        return len(FIRST) + (path.parts[0] in LAST)

    items.sort(key=rank)
