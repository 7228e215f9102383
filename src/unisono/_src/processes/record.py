"""What a process tells the others of itself, and how they put it into words."""

from __future__ import annotations

import dataclasses
import json

RUNNING, FAILING, RAISED, ENDED, LEFT = "running", "failing", "raised", "ended", "left"
"""In its program; with an error that may be another process' fault; with one of its own; at the end of its program; on its way
out because it knows of a lost process."""

DONE = (RAISED, ENDED, LEFT)
"""Whom nobody need wait for any more."""

WORKING, WAITING, BUSY = "working", "waiting", "busy"
"""What its main thread does: the user's code, or anything; waits for others; does something known that may take its time."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One heartbeat.

    Args:
        process: Its number.
        pid: Its id on its machine.
        born: When it started, in the kernel's clock: ids are used again.
        machine: Which machine, or container, the id belongs to.
        host: Its name, for messages.
        beat: Counts up; a new number is a sign of life.
        step: The last finished step; None before the first.
        state: One of those above.
        phase: What its main thread does.
        seconds: For how long it has done so without finishing a step.
        words: The error that it raised, or what it is busy with or waits for.
        stack: Where its main thread stands, once that has not moved for a while.
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

    def encoded(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @property
    def where(self) -> str:
        return "before its first step" if self.step is None else f"after step {self.step}"

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid} on {self.host})"


def decoded(text: str) -> Record:
    return Record(**json.loads(text))
