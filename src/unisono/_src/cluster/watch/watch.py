"""The watch of one process: what it tells the others, what it hears of them, and its verdict when one is lost."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable

from unisono._src.cluster.watch import local_processes, main_stack
from unisono._src.cluster.watch.board import Board
from unisono._src.cluster.watch.verdict import (
    BEFORE_THE_FIRST_STEP,
    PATIENCE,
    Observation,
    Verdict,
    judge_processes,
    make_error_verdict,
)
from unisono._src.jax_private import distributed
from unisono._src.processes.activity import Activity
from unisono._src.processes.heartbeat import DONE, ENDED, RAISED, RUNNING, WORKING, Heartbeat

OFTEN = 10
"""Heartbeats in a bound."""

LONGEST_INTERVAL = 2.0
"""Seconds."""

SOON = 0.05
"""Seconds between two heartbeats until all processes have been heard of."""

LONGEST_ERROR = 300
"""Characters of an error that are told."""

UNREACHABLE = 3.0
"""Seconds after which failing calls are no hiccup of the network. JAX, which does not wait at all, aborts after six (`abort`)."""


class ProcessWatch(Activity):
    """The reports of the main thread, and two threads: one talks to the other processes, one judges them.

    The talking thread waits for process 0, for minutes where that is stopped; so another thread judges.

    Args:
        process: The number of this process.
        processes: The number of processes.
        client: JAX' client of the key-value store.
        bound: Seconds within which a lost process is named and this one has ended.
    """

    def __init__(self, process: int, processes: int, client: distributed.KeyValueStore, bound: float) -> None:
        super().__init__()
        self.bound = bound
        self.interval = min(bound / OFTEN, LONGEST_INTERVAL)
        self.processes = processes
        self.process = process
        self.board = Board(client)
        self._client = client
        self.state = RUNNING
        self.error = ""
        self.is_decided = threading.Event()
        """A verdict is known, and this process leaves by itself."""
        self.all_met = threading.Event()
        """All processes have been heard of."""
        pid = os.getpid()
        self._own_heartbeat = Heartbeat(
            process, pid, local_processes.read_start_time(pid), local_processes.read_machine_name(), socket.gethostname()
        )
        self._heartbeats: dict[int, Heartbeat] = {}
        self._heard_at: dict[int, float] = {}
        self._store_read_at = self._begun_at = time.monotonic()
        self._store_error = ""
        self._verdict: Verdict | None = None
        self._over = threading.Event()
        self._news = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, answer: Callable[[ProcessWatch, Verdict], None]) -> None:
        """Start both threads. The judging thread calls `answer` once, when a process is lost."""
        for work, arguments in ((self._talk, ()), (self._judge, (answer,))):
            thread = threading.Thread(target=work, args=arguments, name=f"unisono watch {work.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Stop publishing and judging."""
        self._over.set()
        self._news.set()

    def rest(self, seconds: float) -> None:
        """Stop, and wait for both threads, `seconds` for each at most. A thread that is in JAX' code when the interpreter ends aborts the
        process, unless its call never returns."""
        self.stop()
        for thread in self._threads:
            thread.join(seconds)

    def record(self) -> Heartbeat:
        """Return the heartbeat of this process now."""
        seconds = time.monotonic() - self.moved_at
        stack = main_stack.format_main_stack() if self.phase == WORKING and seconds > self.bound * PATIENCE / 2 else ""
        words = self.error or self.doing
        return dataclasses.replace(
            self._own_heartbeat, step=self.step, state=self.state, phase=self.phase, seconds=seconds, words=words, stack=stack
        )

    def others_are_done(self) -> bool:
        """Return whether no other process waits for this process any more."""
        heard = self._collect_heard(time.monotonic())
        others = [heard.get(process) for process in range(self.processes) if process != self.process]
        return all(other is not None and (other.record.state in DONE or other.seen == local_processes.GONE) for other in others)

    def others_have_ended(self) -> bool:
        """Return whether all others have come to the end of their programs, so that JAX may disconnect from them."""
        records = self._heartbeats  # the talking thread replaces it
        return all(
            process in records and records[process].state == ENDED for process in range(self.processes) if process != self.process
        )

    def others_are_gone(self) -> bool:
        """Return whether no other process reads the store any more. A silent process does not read it."""
        return all(
            other.seen == local_processes.GONE or other.silence > 3 * self.interval + 1.0
            for process, other in self._collect_heard(time.monotonic()).items()
            if process != self.process
        )

    def publish_soon(self) -> None:
        """Publish now what has changed."""
        self._news.set()

    def fail(self, error: BaseException) -> Verdict:
        """Note that the program has ended by this error, and return the verdict on this process."""
        self.error = f"{type(error).__name__}: {error}".partition("\n")[0][:LONGEST_ERROR].rstrip(": ")
        self.state = RAISED
        self.publish_soon()
        return make_error_verdict(self.record())

    def _talk(self) -> None:
        while not self._over.is_set():
            self._news.clear()
            try:
                self._own_heartbeat = dataclasses.replace(self._own_heartbeat, beat=self._own_heartbeat.beat + 1)
                self.board.publish_heartbeat(self.record())
                self._note_heard(self.board.read_heartbeats(), self.board.read_verdict())
            except Exception as error:  # whatever JAX raises here: process 0 did not answer
                if distributed.get_client() is not self._client:
                    self.stop()  # the program has disconnected
                self._store_error = str(error).partition("\n")[0] or type(error).__name__
            self._news.wait(self.interval if self.all_met.is_set() else SOON)

    def _note_heard(self, records: dict[int, Heartbeat], verdict: Verdict | None) -> None:
        now = time.monotonic()
        for process, record in records.items():
            if process not in self._heartbeats or self._heartbeats[process].beat != record.beat:
                self._heard_at[process] = now
        self._heartbeats = records
        self._verdict = verdict
        self._store_read_at = now
        self._store_error = ""
        if len(records) == self.processes:
            self.all_met.set()

    def _judge(self, answer: Callable[[ProcessWatch, Verdict], None]) -> None:
        last_look = time.monotonic()
        while not self._over.wait(min(self.interval, 0.5)):
            now = time.monotonic()
            stopped = now - last_look
            if stopped > self.bound * PATIENCE / 2:  # this process itself was stopped: what it has not heard proves nothing
                self._store_read_at = self._begun_at = now
                self._heard_at = dict.fromkeys(list(self._heard_at), now)  # a copy of the keys: the talking thread may add one
            last_look = now
            verdict = self._verdict or self._find_verdict(now, stopped)
            if verdict is not None:
                answer(self, verdict)
                return

    def _find_verdict(self, now: float, stopped: float) -> Verdict | None:
        own = self.record()
        heard = self._collect_heard(now)
        return (
            judge_processes(own, heard, self.bound, self.interval, stopped)
            or self._find_unreachable(now)
            or self._find_absent(now)
        )

    def _collect_heard(self, now: float) -> dict[int, Observation]:
        """Return what is known of each process. Silence counts up to the last time that the store was read, but for process 0, which keeps it."""
        return {
            process: Observation(
                record,
                (now if process == 0 else self._store_read_at) - self._heard_at.get(process, now),
                self._read_state(record),
            )
            for process, record in self._heartbeats.items()
        }

    def _read_state(self, record: Heartbeat) -> str | None:
        return (
            local_processes.read_process_state(record.pid, record.born) if record.machine == self._own_heartbeat.machine else None
        )

    def _find_unreachable(self, now: float) -> Verdict | None:
        if self.process == 0 or not self._store_error or now - self._store_read_at < min(UNREACHABLE, self.bound * PATIENCE):
            return None
        name = self._heartbeats.get(0, "process 0")
        return Verdict(
            0, f"{name} cannot be reached: it keeps the store through which all processes speak. JAX says: {self._store_error}"
        )

    def _find_absent(self, now: float) -> Verdict | None:
        if now - self._begun_at < self.bound * BEFORE_THE_FIRST_STEP:
            return None
        absent = [process for process in range(self.processes) if process not in self._heartbeats]
        return Verdict(absent[0], f"process {absent[0]} has never been heard of.") if absent else None
