"""CPU seconds of the tests of each package, printed beside budgets at the end of runs that take a minute or more.

Nothing fails if a budget is exceeded: a feature pays for its tests by making others cheaper.
"""

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

LEAST_SECONDS = 60.0
"""Of a run whose table is printed."""
BUDGETS = {
    "training": 110,
    "model": 110,
    "convert": 83,
    "data_prep": 70,
    "analysis": 60,
    "compress": 45,
    "finetune": 25,
    "data": 25,
    "(collection)": 40,
    "(others)": 25,
    "cli": 20,
    "objectives": 18,
    "planning": 15,
    "doctor": 12,
    "experiments": 8,
    "inference": 6,
    "interventions": 6,
    "tokenizers": 6,
    "distributed": 6,
    "config": 5,
    "run_report": 5,
    "report": 5,
    "launchers": 5,
    "scripts": 5,
    "bench": 2,
    "storage": 3,
}
"""CPU seconds of a package's tests in the quick set. The sum is the goal, 6 minutes of two cores; the shares are those
of a run without compiled programs in the cache, which took 1,564 s (docs/log/project.md, 2026-11-27). "(collection)" is
the import of all test files, in each of two processes."""


class CpuTime:
    """A plugin of pytest. With pytest-xdist, reports carry the seconds from the processes that measured them."""

    def __init__(self) -> None:
        self._last = self._collection = 0.0
        self._seconds: Counter[tuple[str, bool]] = Counter()

    def pytest_collection_finish(self) -> None:
        """Every process imports all test files: what that takes is not part of its first test."""
        self._last = self._collection = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add `cpu_seconds` to a report: since the one before it, fixtures included. The first has the collection's."""
        report = yield
        now = _cpu_seconds()
        report.cpu_seconds, self._last = now - self._last, now
        report.collection_seconds, self._collection = self._collection, 0.0
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a report for its package, a directory in tests/."""
        parts = Path(report.nodeid.partition("::")[0]).parts
        package = parts[1] if len(parts) > 2 else "(others)"
        seconds = getattr(report, "cpu_seconds", 0.0)  # the report of a process that died has none
        self._seconds[package, "slow" in report.keywords] += seconds
        self._seconds["(collection)", False] += getattr(report, "collection_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table, the most expensive package first."""
        if sum(self._seconds.values()) < LEAST_SECONDS:
            return
        terminalreporter.section("CPU seconds of quick tests, their budget, and of slow tests")
        packages = sorted({package for package, _ in self._seconds}, key=lambda one: -self._sum(one))
        for package in packages:
            quick, slow = self._seconds[package, False], self._seconds[package, True]
            terminalreporter.line(f"{package:<16}{quick:8.0f}{BUDGETS.get(package, 0):8}{slow:8.0f}")
        totals = [sum(self._seconds[one, is_slow] for one in packages) for is_slow in (False, True)]
        terminalreporter.line(f"{'all':<16}{totals[0]:8.0f}{sum(BUDGETS.values()):8}{totals[1]:8.0f}")

    def _sum(self, package: str) -> float:
        return self._seconds[package, False] + self._seconds[package, True]


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
