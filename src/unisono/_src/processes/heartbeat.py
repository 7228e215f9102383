"""Heartbeats: what a process tells the others of itself, and the text in which it is sent."""

from __future__ import annotations

import dataclasses
import json

RUNNING = "running"
"""The process is in its program."""
FAILING = "failing"
"""The process has an error that may be the fault of another process."""
RAISED = "raised"
"""The process has an error of its own."""
ENDED = "ended"
"""The process is at the end of its program."""
LEFT = "left"
"""The process is on its way out, because it knows of a lost process."""

DONE = (RAISED, ENDED, LEFT)
"""States of processes for which nobody need wait any more."""

WORKING = "working"
"""The main thread runs the user's code, or anything else."""
WAITING = "waiting"
"""The main thread waits for other processes."""
BUSY = "busy"
"""The main thread does known work that may take long."""


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """One heartbeat.

    Args:
        process: The number of the process.
        pid: Its id on its machine.
        born: When it started, in the kernel's clock: ids are used again.
        machine: The machine, or container, that the id belongs to.
        host: The name of the machine, for messages.
        beat: Counts up; a new number is a sign of life.
        step: The last finished step; None before the first.
        state: RUNNING, FAILING, RAISED, ENDED or LEFT.
        phase: What its main thread does: WORKING, WAITING or BUSY.
        seconds: For how long it has done so without finishing a step.
        words: The error that it raised, or what it is busy with or waits for.
        stack: Where its main thread stands, once it has not moved for a while.
    """

    process: int
    pid: int
    born: int
    machine: str
    host: str
    beat: int = 0
    step: int | None = None
    state: str = RUNNING
    phase: str = WORKING
    seconds: float = 0.0
    words: str = ""
    stack: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @property
    def where(self) -> str:
        return "before its first step" if self.step is None else f"after step {self.step}"

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid} on {self.host})"


def parse_heartbeat(text: str) -> Heartbeat:
    return Heartbeat(**json.loads(text))
