"""CPU time of the tests: of all of them, and of the most expensive files. It holds them to a budget, which wall time cannot: load changes that.

UNISONO_CPU_MINUTES is the budget, in minutes of a quiet machine: a fixed piece of work, measured beside the tests, tells how much slower this one
is (tests/helpers/machine_speed.py). A run that takes more fails, whatever its tests say. User and system time count, those of the processes that
tests start as well, and what each worker needs to import and to collect.
"""

from __future__ import annotations

import collections
import os

import pytest

from machine_speed import Stopwatch, compute_factor

SHOWN = 10
"""Files in the list."""

START = "(start of workers, collection)"


def read_cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuTime:
    """Adds up the CPU time of test files, in a worker or in a single process, and reports it where the run ends."""

    def __init__(self, budget: float | None):
        self.budget = budget
        self.seconds: collections.Counter[str] = collections.Counter()
        self.stopwatch = Stopwatch()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self.stopwatch.look()
        before = read_cpu_seconds()
        yield
        self.seconds[item.location[0]] += read_cpu_seconds() - before

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session):
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["cpu_seconds"] = {**self.seconds, START: read_cpu_seconds() - sum(self.seconds.values())}
            output["piece_of_work"] = self.stopwatch.measured
        elif self.is_over():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        """Take what a worker has counted and measured."""
        output = getattr(node, "workeroutput", {})
        self.seconds.update(output.get("cpu_seconds", {}))
        self.stopwatch.measured += output.get("piece_of_work", [])

    def count_minutes(self) -> float:
        """Return the CPU time of the whole run so far."""
        if START in self.seconds:  # workers have told theirs; what this process has waited for are the workers themselves
            times = os.times()
            return (sum(self.seconds.values()) + times.user + times.system) / 60
        return read_cpu_seconds() / 60

    def count_quiet_minutes(self) -> float:
        """Return the CPU time that the run so far would have taken on a quiet machine."""
        return self.count_minutes() / compute_factor(self.stopwatch.measured)

    def is_over(self) -> bool:
        return self.budget is not None and self.count_quiet_minutes() > self.budget

    def pytest_terminal_summary(self, terminalreporter):
        if not self.seconds:
            return
        factor, measured = compute_factor(self.stopwatch.measured), len(self.stopwatch.measured)
        limit = f", of {self.budget:g} that they may take" if self.budget is not None else ""
        terminalreporter.section("CPU time")
        for name, seconds in self.seconds.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
        terminalreporter.write_line(f"{self.count_minutes():7.2f} min of CPU time, user and system")
        terminalreporter.write_line(f"{factor:7.2f} times that of a quiet machine, by {measured} measurements of a piece of work")
        terminalreporter.write_line(f"{self.count_quiet_minutes():7.2f} min of a quiet machine{limit}")
        if self.is_over():
            terminalreporter.write_line(
                "The tests take more CPU time than they may: make expensive ones smaller, or move them to make test-all."
            )


def register(config: pytest.Config) -> None:
    """Count the CPU time of a run."""
    budget = os.environ.get("UNISONO_CPU_MINUTES")
    config.pluginmanager.register(CpuTime(float(budget) if budget else None), "cpu-time")
