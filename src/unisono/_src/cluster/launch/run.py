"""One run of all processes: started together, watched, and ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator

from unisono._src.cluster.launch.forward_signals import Signals
from unisono._src.cluster.launch.outcome import End, Outcome
from unisono._src.cluster.launch.output import Screen, last_traceback
from unisono._src.cluster.launch.target import Program
from unisono._src.cluster.launch.worker_environment import LOOPBACK, Devices, environment_of
from unisono._src.cluster.launch.worker_process import WorkerProcess

TICK = 0.05
"""Seconds between two looks at who has ended."""

LAST_CALL = 5.0
"""Seconds between SIGTERM and SIGKILL for processes that do not end by themselves."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `unisono launch` was asked for."""

    program: Program
    devices: Devices
    bound: float


def run(settings: Settings, processes: int, restarts: int, screen: Screen, signals: Signals) -> Outcome:
    """Starts the processes, and returns when all have ended and nothing of them is left."""
    with free_port() as port, selectors.DefaultSelector() as selector:
        environments = [
            environment_of(os.environ, process, processes, port, settings.devices, restarts, settings.bound)
            for process in range(processes)
        ]
        command, workers = settings.program.command(os.getpid()), []
        try:
            for number, environment in enumerate(environments):
                workers.append(WorkerProcess(number, command, environment, screen))
            return Course(workers, settings.bound, selector, signals).to_the_end()
        finally:
            for worker in workers:
                worker.kill()


class Course:
    """The workers on their way: those that run, and how the others ended."""

    def __init__(self, workers: list[WorkerProcess], bound: float, selector: selectors.BaseSelector, signals: Signals) -> None:
        self._running, self._bound, self._selector, self._signals = list(workers), bound, selector, signals
        self._is_alone, self._seen_going = len(workers) == 1, time.monotonic()
        self._ends: list[End] = []
        self._terminate_at = self._kill_at = float("inf")
        self._forced = False
        for worker in workers:
            worker.watched_by(selector)

    def to_the_end(self) -> Outcome:
        while self._running:
            for key, _ in self._selector.select(TICK):
                key.data()
            for number in self._signals.take():
                for worker in self._running:
                    worker.send(number)
            if self._signals.at_once:
                self._kill_at = 0.0
            self._notice_ends()
            self._enforce(time.monotonic())
        return Outcome(tuple(self._ends))

    def _notice_ends(self) -> None:
        for worker in [worker for worker in self._running if worker.ended()]:
            self._running.remove(worker)
            self._ends.append(self._end_of(worker, self._forced))
            if self._ends[-1].is_failure and self._terminate_at == float("inf"):
                # The others have the same bound to notice it and to say what they know.
                self._terminate_at = time.monotonic() + self._bound
                self._kill_at = min(self._kill_at, self._terminate_at + LAST_CALL)

    def _enforce(self, now: float) -> None:
        if self._is_alone:
            self._end_a_stopped_one(now)
        if any(end.is_failure for end in self._ends):  # who is stopped has nothing to say, and does not hear SIGTERM
            self._kill([worker for worker in self._running if worker.is_stopped])
        if now >= self._kill_at:
            self._kill(self._running)
        elif now >= self._terminate_at:
            for worker in self._running:
                worker.send(signal.SIGTERM)
            self._terminate_at, self._forced = self._kill_at, True

    def _end_a_stopped_one(self, now: float) -> None:
        """Of several, the others name it; here nobody else is there to do so."""
        if not all(worker.is_stopped for worker in self._running):
            self._seen_going = now
        elif now - self._seen_going > self._bound:
            self._kill(self._running, was_stopped=True)

    def _kill(self, workers: list[WorkerProcess], was_stopped: bool = False) -> None:
        for worker in list(workers):
            worker.kill()
            self._running.remove(worker)
            self._ends.append(self._end_of(worker, forced=True, was_stopped=was_stopped))

    def _end_of(self, worker: WorkerProcess, forced: bool, was_stopped: bool = False) -> End:
        worker.finish(self._selector)
        words = tuple(last_traceback(list(worker.error.last)))
        return End(worker.number, worker.code, worker.signal, forced, words, was_stopped)


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A free port on loopback, held for the block so that nobody else is given it: the coordinator, which allows sharing as every
    gRPC server does, may listen there beside this socket, which does not."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((LOOPBACK, 0))
        yield held.getsockname()[1]
