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

from unisono._src.cluster.launch.forward_signals import PendingSignals
from unisono._src.cluster.launch.outcome import Outcome, ProcessEnd
from unisono._src.cluster.launch.output import Screen, find_last_traceback
from unisono._src.cluster.launch.target import LaunchedProgram
from unisono._src.cluster.launch.worker_environment import LOOPBACK, WorkerDevices, make_worker_environment
from unisono._src.cluster.launch.worker_process import WorkerProcess

TICK = 0.05
"""Seconds between two looks at which processes have ended."""

LAST_CALL = 5.0
"""Seconds between SIGTERM and SIGKILL for processes that do not end by themselves."""


@dataclasses.dataclass(frozen=True)
class LaunchSettings:
    """The options of `unisono launch` that all runs share."""

    program: LaunchedProgram
    devices: WorkerDevices
    bound: float


def run_processes(settings: LaunchSettings, processes: int, restarts: int, screen: Screen, signals: PendingSignals) -> Outcome:
    """Start the processes, and return when all have ended and nothing of them is left."""
    with hold_free_port() as port, selectors.DefaultSelector() as selector:
        environments = [
            make_worker_environment(os.environ, process, processes, port, settings.devices, restarts, settings.bound)
            for process in range(processes)
        ]
        command = settings.program.command(os.getpid())
        workers: list[WorkerProcess] = []
        try:
            for number, environment in enumerate(environments):
                workers.append(WorkerProcess(number, command, environment, screen))
            return RunningWorkers(workers, settings.bound, selector, signals).run_to_end()
        finally:
            for worker in workers:
                worker.kill()


class RunningWorkers:
    """The workers of one run: the processes that still run, and the ends of the others."""

    def __init__(
        self, workers: list[WorkerProcess], bound: float, selector: selectors.BaseSelector, signals: PendingSignals
    ) -> None:
        self._running = list(workers)
        self._bound = bound
        self._selector = selector
        self._signals = signals
        self._is_alone = len(workers) == 1
        self._last_seen_running = time.monotonic()
        self._ends: list[ProcessEnd] = []
        self._terminate_at = self._kill_at = float("inf")
        self._forced = False
        for worker in workers:
            worker.register_output(selector)

    def run_to_end(self) -> Outcome:
        while self._running:
            for key, _ in self._selector.select(TICK):
                key.data()
            for number in self._signals.take():
                for worker in self._running:
                    worker.send(number)
            if self._signals.must_kill:
                self._kill_at = 0.0
            self._notice_ends()
            self._enforce_bound(time.monotonic())
        return Outcome(tuple(self._ends))

    def _notice_ends(self) -> None:
        for worker in [worker for worker in self._running if worker.ended()]:
            self._running.remove(worker)
            self._ends.append(self._collect_end(worker, self._forced))
            if self._ends[-1].is_failure and self._terminate_at == float("inf"):
                # The others have the same bound to notice it and to say what they know.
                self._terminate_at = time.monotonic() + self._bound
                self._kill_at = min(self._kill_at, self._terminate_at + LAST_CALL)

    def _enforce_bound(self, now: float) -> None:
        if self._is_alone:
            self._kill_stopped_worker(now)
        if any(end.is_failure for end in self._ends):  # a stopped process has nothing to say, and does not hear SIGTERM
            self._kill([worker for worker in self._running if worker.is_stopped])
        if now >= self._kill_at:
            self._kill(self._running)
        elif now >= self._terminate_at:
            for worker in self._running:
                worker.send(signal.SIGTERM)
            self._terminate_at = self._kill_at
            self._forced = True

    def _kill_stopped_worker(self, now: float) -> None:
        """Kill a worker that is alone and stopped for longer than the bound. Of several workers, the others name the stopped one."""
        if not all(worker.is_stopped for worker in self._running):
            self._last_seen_running = now
        elif now - self._last_seen_running > self._bound:
            self._kill(self._running, was_stopped=True)

    def _kill(self, workers: list[WorkerProcess], was_stopped: bool = False) -> None:
        for worker in list(workers):
            worker.kill()
            self._running.remove(worker)
            self._ends.append(self._collect_end(worker, forced=True, was_stopped=was_stopped))

    def _collect_end(self, worker: WorkerProcess, forced: bool, was_stopped: bool = False) -> ProcessEnd:
        worker.finish(self._selector)
        words = tuple(find_last_traceback(list(worker.error.last)))
        return ProcessEnd(worker.number, worker.code, worker.signal, forced, words, was_stopped)


@contextlib.contextmanager
def hold_free_port() -> Iterator[int]:
    """Hold a free port on loopback for the block, so that no other program is given it. The coordinator, which shares its port as every
    gRPC server does, may listen there beside this socket, which does not listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]
