"""The board: what the processes tell each other. It lies in the key-value store of `jax.distributed`, which process 0 keeps."""

from __future__ import annotations

import dataclasses
import json

import jax

from unisono._src.processes.activity import WORKING
from unisono._src.programs.private.distributed import KeyValueStore

RUNNING = "running"
"""The process is in its program."""
FAILING = "failing"
"""The process has an error that may be the fault of another process."""
RAISED = "raised"
"""The process has an error of its own."""
ENDED = "ended"
"""The process is at the end of its program."""
LEFT = "left"
"""The process is leaving, because it knows of a lost process."""

DONE = (RAISED, ENDED, LEFT)
"""States of processes that nobody waits for any more."""

HEARTBEATS = "unisono/watch/records/"
VERDICTS = "unisono/watch/verdict/"
THE_ONE = f"{VERDICTS}first"
"""The key of the first verdict, which is never written again."""


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """A process' message about itself to the others."""

    process: int
    pid: int
    born: int
    """When it started, in the kernel's clock: process ids are used again."""
    machine: str
    """The machine, or container, that the id belongs to."""
    host: str
    """The name of the machine, for messages."""
    beat: int = 0
    """Counts up; a new number is a sign of life."""
    step: int | None = None
    """The last finished step."""
    state: str = RUNNING
    phase: str = WORKING
    seconds: float = 0.0
    """How long its main thread is in this phase without finishing a step."""
    words: str = ""
    """The error that it raised, or what it is busy with or waits for."""
    stack: str = ""
    """The stack of its main thread, once it has not moved for a while."""

    @property
    def where(self) -> str:
        return describe_step(self.step)

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid} on {self.host})"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The lost process, and how it was lost."""

    process: int
    words: str


def describe_step(step: int | None) -> str:
    return "before its first step" if step is None else f"after step {step}"


class Board:
    """The heartbeats and the verdict that all processes see.

    Each call waits for process 0, for minutes if that is stopped, so it belongs into a thread that may wait.
    """

    def __init__(self, client: KeyValueStore) -> None:
        self._client = client

    def publish_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._client.key_value_set(
            f"{HEARTBEATS}{heartbeat.process}", json.dumps(dataclasses.asdict(heartbeat)), allow_overwrite=True
        )

    def read_heartbeats(self) -> dict[int, Heartbeat]:
        """Read the last heartbeat of each process, by rank."""
        heartbeats = [Heartbeat(**json.loads(text)) for _, text in self._client.key_value_dir_get(HEARTBEATS)]
        return {heartbeat.process: heartbeat for heartbeat in heartbeats}

    def read_verdict(self) -> Verdict | None:
        """Read the verdict of all processes; None if there is none yet."""
        entries = self._client.key_value_dir_get(VERDICTS)
        return Verdict(**json.loads(entries[0][1])) if entries else None

    def settle(self, own: Verdict) -> Verdict:
        """Settle the verdict of all processes: the first one holds.

        `own` becomes it if there is none yet. A process that fails later fails because of the first.
        """
        try:
            self._client.key_value_set(THE_ONE, json.dumps(dataclasses.asdict(own)))
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("ALREADY_EXISTS"):
                raise
        return self.read_verdict() or own
