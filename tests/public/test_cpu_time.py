"""The budget of CPU time is in minutes of a quiet machine: a slow hour fails no run, and a quick one excuses none."""

from __future__ import annotations

import pytest

import cpu_time
from machine_speed import QUIET, Stopwatch, compute_factor


@pytest.mark.parametrize(("slower", "is_over"), [(1.0, True), (2.0, False), (0.5, True)])
def test_minutes_count_as_those_of_a_quiet_machine(monkeypatch, slower, is_over):
    monkeypatch.setattr(cpu_time, "read_cpu_seconds", lambda: 90.0)
    run = cpu_time.CpuTime(budget=1.0)
    run.stopwatch.measured += [slower * QUIET, slower * QUIET, 50 * QUIET]  # something else ran beside one of them
    assert run.count_quiet_minutes() == pytest.approx(1.5 / slower)
    assert run.is_over() == is_over


def test_the_piece_of_work_is_measured_now_and_then():
    stopwatch = Stopwatch()
    for _ in range(3):
        stopwatch.look()
    assert len(stopwatch.measured) == 1
    assert 0.1 < compute_factor(stopwatch.measured) < 20
    assert compute_factor([]) == 1.0
