"""Runs of all processes, one after another, as often as restarts are allowed."""

from __future__ import annotations

import sys

from unisono._src.cluster.launch.forward_signals import collect_signals
from unisono._src.cluster.launch.outcome import Outcome
from unisono._src.cluster.launch.output import Screen
from unisono._src.cluster.launch.run import LaunchSettings, run_processes

CALLBACK = 'un.callbacks.BackupAndRestore("backup", save_freq=100)'


def run_with_restarts(settings: LaunchSettings, processes: int, restarts: int, least: int | None) -> int:
    """Run all processes, again after failures, and return the exit code.

    Args:
        settings: What every run has in common.
        processes: The number of processes of the first run.
        restarts: How many failures are answered by another run.
        least: The smallest number of processes of a run after a failure; None for all processes, every time.
    """
    screen = Screen(sys.stdout, sys.stderr)
    if restarts and not settings.program.seems_to_save():
        screen.write_line(sys.stderr, make_save_warning(settings.program.words))
    with collect_signals() as signals:
        for number in range(restarts + 1):
            outcome = run_processes(settings, processes, number, screen, signals)
            screen.clear_bar()
            if outcome.first_failure is None or signals.is_ending or number == restarts:
                break
            processes = count_next_processes(processes, outcome, least)
            screen.write_line(
                sys.stderr,
                f"{outcome.report()}\nunisono launch: restart {number + 1} of {restarts}, with {processes_in_words(processes)}.",
            )
    if outcome.first_failure is not None:
        screen.write_line(sys.stderr, outcome.report())
    return outcome.code


def count_next_processes(processes: int, outcome: Outcome, least: int | None) -> int:
    """Return the number of processes of the next run."""
    return processes if least is None else max(least, processes - outcome.lost)


def make_save_warning(words: tuple[str, ...]) -> str:
    """Return the warning that a program seems to save nothing."""
    return (
        f"unisono launch: {' '.join(words[:2] if words[0] == '-m' else words[:1])} seems to save nothing, so that a restart would begin "
        f"from the start. Add to the callbacks of fit:\n\n    {CALLBACK}\n"
    )


def processes_in_words(processes: int) -> str:
    return f"{processes} process{'es' * (processes != 1)}"
