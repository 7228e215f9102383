"""The runs of `unisono launch`.

The processes of a run start together and end together. After a failure the next run starts, until the restarts are used up.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from types import FrameType

from unisono._src.processes.launch.outcome import ProcessEnd, count_own_failures, find_first_failure
from unisono._src.processes.launch.output import Screen
from unisono._src.processes.launch.target import seems_to_save
from unisono._src.processes.launch.worker_environment import LOOPBACK, WorkerDevices, make_worker_environment
from unisono._src.processes.launch.worker_process import WorkerProcess

BOOTSTRAP = str(pathlib.Path(__file__).with_name("worker.py"))
"""The start of a worker. It is run by its path, so that it imports nothing of Unisono."""

CALLBACK = 'un.callbacks.BackupAndRestore("backup", save_freq=100)'

TICK = 0.05
"""Seconds between two looks at which processes have ended."""

LAST_CALL = 5.0
"""Seconds between SIGTERM and SIGKILL for processes that do not end by themselves."""


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (*ENDING, signal.SIGUSR1)
AT_ONCE = 3
"""The launcher kills the workers after this many requests to end. A worker in compiled code hears no signal."""


class PassedSignals:
    """Signals that the launcher receives and passes on to the workers."""

    def __init__(self) -> None:
        self.pending: collections.deque[int] = collections.deque()
        self.requests_to_end = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        """Add a signal to the pending ones. This is its handler."""
        self.pending.append(number)
        self.requests_to_end += number in ENDING

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Collect the signals that come while the block runs."""
        before = {number: signal.signal(number, self.note) for number in PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class LaunchSettings:
    """The options of `unisono launch` that all runs share."""

    program: tuple[str, ...]
    """A script or -m and a module, and its arguments."""
    devices: WorkerDevices
    bound: float


def run_with_restarts(settings: LaunchSettings, processes: int, restarts: int, least: int | None) -> int:
    """Run all processes, again after failures; the result is the exit code.

    `least` is the smallest number of processes after a failure. With None, each run has all of them.
    """
    screen = Screen(sys.stdout, sys.stderr)
    words = settings.program
    if restarts and not seems_to_save(words):
        screen.write_line(
            sys.stderr,
            f"unisono launch: {' '.join(words[:2] if words[0] == '-m' else words[:1])} seems to save nothing, so that a restart would begin "
            f"from the start. Add to the callbacks of fit:\n\n    {CALLBACK}\n",
        )
    restarted = 0
    signals = PassedSignals()
    with signals.collect():
        while True:
            ends = run_processes(settings, processes, restarted, screen, signals)
            screen.clear_bar()
            failure = find_first_failure(ends)
            if failure is None:  # 75 if some have left as they were asked to
                return max(end.code for end in ends)
            screen.write_line(sys.stderr, "\n".join([f"unisono launch: {failure}.", *failure.last_words]))
            if signals.requests_to_end or restarted == restarts:
                return failure.code
            restarted += 1
            processes = count_next_processes(processes, ends, least)
            started = f"{processes} process{'es' * (processes != 1)}"
            screen.write_line(sys.stderr, f"unisono launch: restart {restarted} of {restarts}, with {started}.")


def count_next_processes(processes: int, ends: list[ProcessEnd], least: int | None) -> int:
    """Count the processes of the next run."""
    return processes if least is None else max(least, processes - count_own_failures(ends))


def run_processes(
    settings: LaunchSettings, processes: int, restarts: int, screen: Screen, signals: PassedSignals
) -> list[ProcessEnd]:
    """Start the processes, and wait until nothing of them is left. The result has their ends in the order in which they came."""
    command = [sys.executable, BOOTSTRAP, str(os.getpid()), *settings.program]
    workers: list[WorkerProcess] = []
    with socket.socket() as holder, selectors.DefaultSelector() as selector:
        # A free port on loopback is held, so that no other program is given it. The coordinator, which shares its port as every gRPC server
        # does, may listen there beside this socket, which does not listen.
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
        holder.bind((LOOPBACK, 0))
        port = holder.getsockname()[1]
        try:
            for number in range(processes):
                environment = make_worker_environment(
                    os.environ, number, processes, port, settings.devices, restarts, settings.bound
                )
                workers.append(WorkerProcess(number, command, environment, screen, selector))
            return RunningWorkers(workers, settings.bound, selector, signals).run_to_end()
        finally:
            for worker in workers:  # those that still run, after an error
                worker.kill()


class RunningWorkers:
    """The workers of one run, and the ends of the finished ones."""

    def __init__(
        self, workers: list[WorkerProcess], bound: float, selector: selectors.BaseSelector, signals: PassedSignals
    ) -> None:
        self._running = workers  # ended workers are taken out: their process ids may soon belong to other processes
        self._bound = bound
        self._selector = selector
        self._signals = signals
        self._is_alone = len(workers) == 1
        self._last_seen_running = time.monotonic()
        self._ends: list[ProcessEnd] = []
        self._terminate_at = self._kill_at = float("inf")
        self._forced = False

    def run_to_end(self) -> list[ProcessEnd]:
        while self._running:
            for key, _ in self._selector.select(TICK):
                key.data()
            while self._signals.pending:
                self._send(self._signals.pending.popleft())
            if self._signals.requests_to_end >= AT_ONCE:
                self._kill_at = 0.0
            self._end([worker for worker in self._running if worker.has_ended()], self._forced)
            self._enforce_bound(time.monotonic())
        return self._ends

    def _enforce_bound(self, now: float) -> None:
        if not self._is_alone or not all(worker.is_stopped for worker in self._running):
            self._last_seen_running = now
        elif now - self._last_seen_running > self._bound:  # of several workers, the others name the stopped one
            self._end(self._running, forced=True, was_stopped=True)
        if any(end.is_failure for end in self._ends):
            if self._terminate_at == float("inf"):  # the others have the same bound to notice it and to say what they know
                self._terminate_at = now + self._bound
                self._kill_at = min(self._kill_at, self._terminate_at + LAST_CALL)
            # A stopped process has nothing to say, and does not hear SIGTERM.
            self._end([worker for worker in self._running if worker.is_stopped], forced=True)
        if now >= self._kill_at:
            self._end(self._running, forced=True)
        elif now >= self._terminate_at:
            self._send(signal.SIGTERM)
            self._terminate_at = self._kill_at
            self._forced = True

    def _send(self, number: int) -> None:
        for worker in self._running:
            worker.send(number)

    def _end(self, workers: list[WorkerProcess], forced: bool, was_stopped: bool = False) -> None:
        for worker in list(workers):
            self._running.remove(worker)
            self._ends.append(worker.finish(forced, was_stopped))
