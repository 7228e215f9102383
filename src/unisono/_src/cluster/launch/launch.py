"""From the first start to the last end: runs of all processes, as often as failures are forgiven."""

from __future__ import annotations

import sys

from unisono._src.cluster.launch.forward_signals import passed_on
from unisono._src.cluster.launch.outcome import Outcome
from unisono._src.cluster.launch.output import Screen
from unisono._src.cluster.launch.run import Settings, run

CALLBACK = 'un.callbacks.BackupAndRestore("backup", save_freq=100)'


def launch(settings: Settings, processes: int, restarts: int, least: int | None) -> int:
    """The exit code.

    Args:
        settings: What every run has in common.
        processes: How many there are in the first one.
        restarts: How many failures are answered by another run.
        least: The smallest number of processes that is started again after some have failed; None for all of them, every time.
    """
    screen = Screen(sys.stdout, sys.stderr)
    if restarts and not settings.program.seems_to_save():
        screen.line(sys.stderr, warning(settings.program.words))
    with passed_on() as signals:
        for count in range(restarts + 1):
            outcome = run(settings, processes, count, screen, signals)
            screen.no_bar()
            if outcome.first_failure is None or signals.is_ending or count == restarts:
                break
            processes = left(processes, outcome, least)
            screen.line(
                sys.stderr, f"{outcome.report()}\nunisono launch: restart {count + 1} of {restarts}, with {counted(processes)}."
            )
    if outcome.first_failure is not None:
        screen.line(sys.stderr, outcome.report())
    return outcome.code


def left(processes: int, outcome: Outcome, least: int | None) -> int:
    """How many processes the next run has."""
    return processes if least is None else max(least, processes - outcome.lost)


def warning(words: tuple[str, ...]) -> str:
    return (
        f"unisono launch: {' '.join(words[:2] if words[0] == '-m' else words[:1])} seems to save nothing, so that a restart would begin "
        f"from the start. Add to the callbacks of fit:\n\n    {CALLBACK}\n"
    )


def counted(processes: int) -> str:
    return f"{processes} process{'es' * (processes != 1)}"
