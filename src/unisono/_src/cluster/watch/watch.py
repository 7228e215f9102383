"""The watch of one process: what it tells the others, what it hears of them, and what it does when one is lost."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from unisono._src.cluster.watch import local_processes, main_stack
from unisono._src.cluster.watch.board import Board
from unisono._src.cluster.watch.verdict import BEFORE_THE_FIRST_STEP, PATIENCE, Heard, Verdict, judged, of_error
from unisono._src.jax_private import distributed
from unisono._src.processes.progress import Progress
from unisono._src.processes.record import DONE, ENDED, RAISED, RUNNING, WORKING, Record

OFTEN = 10
"""Heartbeats in a bound."""

LONGEST_INTERVAL = 2.0
SOON = 0.05
"""Seconds between two heartbeats until everybody has been heard of."""

LONGEST_ERROR = 300
UNREACHABLE = 3.0
"""Seconds after which calls that fail are no hiccup of the network; JAX, which does not wait at all, aborts after six (`abort`)."""


class Watch(Progress):
    """What the main thread reports, and the two threads that talk and judge.

    The one that talks waits for process 0, for minutes where that is stopped; so another one judges.

    Args:
        process: Which process this is.
        processes: How many there are.
        client: JAX' client of the key-value store.
        bound: Seconds within which a lost process is named and this one has ended.
    """

    def __init__(self, process: int, processes: int, client: Any, bound: float) -> None:
        super().__init__()
        self.bound, self.interval = bound, min(bound / OFTEN, LONGEST_INTERVAL)
        self.processes, self.process = processes, process
        self.board, self._client = Board(client), client
        self.state, self.error = RUNNING, ""
        self.decided = threading.Event()
        """A verdict is known, and this process leaves by itself."""
        self.met = threading.Event()
        """Everybody has been heard of."""
        pid = os.getpid()
        self._me = Record(process, pid, local_processes.born(pid), local_processes.name(), socket.gethostname())
        self._records: dict[int, Record] = {}
        self._heard: dict[int, float] = {}
        self._read = self._begun = time.monotonic()
        self._trouble = ""
        self._verdict: Verdict | None = None
        self._over, self._news = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, answer: Callable[[Watch, Verdict], None]) -> None:
        """Calls `answer` once, in the judging thread, when a process is lost."""
        for work, arguments in ((self._talk, ()), (self._judge, (answer,))):
            thread = threading.Thread(target=work, args=arguments, name=f"unisono watch {work.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Nothing is published and judged any more."""
        self._over.set()
        self._news.set()

    def rest(self, seconds: float) -> None:
        """Stops, and waits until both threads have come to their ends: one that is in JAX' code when the interpreter ends aborts the
        process. One whose call never returns does not, and is not waited for."""
        self.stop()
        for thread in self._threads:
            thread.join(seconds)

    def record(self) -> Record:
        """This process, now."""
        seconds = time.monotonic() - self.moved
        place = main_stack.of_main_thread() if self.phase == WORKING and seconds > self.bound * PATIENCE / 2 else ""
        words = self.error or self.doing
        return dataclasses.replace(
            self._me, step=self.step, state=self.state, phase=self.phase, seconds=seconds, words=words, stack=place
        )

    def others_are_done(self) -> bool:
        """Whether nobody is left who waits for this process."""
        heard = self._all_heard(time.monotonic())
        others = [heard.get(process) for process in range(self.processes) if process != self.process]
        return all(other is not None and (other.record.state in DONE or other.seen == local_processes.GONE) for other in others)

    def others_have_ended(self) -> bool:
        """Whether all have come to the end of their programs, so that JAX may take leave of them."""
        records = self._records
        return all(
            process in records and records[process].state == ENDED for process in range(self.processes) if process != self.process
        )

    def others_are_gone(self) -> bool:
        """Whether nobody reads the store any more; who is silent does not."""
        return all(
            other.seen == local_processes.GONE or other.silence > 3 * self.interval + 1.0
            for process, other in self._all_heard(time.monotonic()).items()
            if process != self.process
        )

    def tell(self) -> None:
        """What has changed is published now."""
        self._news.set()

    def fail(self, error: BaseException) -> Verdict:
        """The program has ended by this error: the verdict on this process."""
        self.error = f"{type(error).__name__}: {error}".partition("\n")[0][:LONGEST_ERROR].rstrip(": ")
        self.state = RAISED
        self.tell()
        return of_error(self.record())

    def _talk(self) -> None:
        while not self._over.is_set():
            self._news.clear()
            try:
                self._me = dataclasses.replace(self._me, beat=self._me.beat + 1)
                self.board.publish(self.record())
                self._hear(self.board.records(), self.board.verdict())
            except Exception as error:  # whatever JAX raises here: process 0 did not answer
                if distributed.client() is not self._client:
                    self.stop()  # the program has taken leave of the others
                self._trouble = str(error).partition("\n")[0] or type(error).__name__
            self._news.wait(self.interval if self.met.is_set() else SOON)

    def _hear(self, records: dict[int, Record], verdict: Verdict | None) -> None:
        now = time.monotonic()
        for process, record in records.items():
            if process not in self._records or self._records[process].beat != record.beat:
                self._heard[process] = now
        self._records, self._verdict, self._read, self._trouble = records, verdict, now, ""
        if len(records) == self.processes:
            self.met.set()

    def _judge(self, answer: Callable[[Watch, Verdict], None]) -> None:
        looked = time.monotonic()
        while not self._over.wait(min(self.interval, 0.5)):
            now = time.monotonic()
            stopped = now - looked
            if stopped > self.bound * PATIENCE / 2:  # this process itself was stopped: what it has not heard proves nothing
                self._read = self._begun = now
                self._heard = dict.fromkeys(self._heard, now)
            looked = now
            verdict = self._verdict or self._found(now, stopped)
            if verdict is not None:
                answer(self, verdict)
                return

    def _found(self, now: float, stopped: float) -> Verdict | None:
        own, heard = self.record(), self._all_heard(now)
        return judged(own, heard, self.bound, self.interval, stopped) or self._unreachable(now) or self._absent(now)

    def _all_heard(self, now: float) -> dict[int, Heard]:
        """Silence counts up to the last time that the store was read, but for process 0, which keeps it."""
        return {
            process: Heard(record, (now if process == 0 else self._read) - self._heard[process], self._seen(record))
            for process, record in self._records.items()
        }

    def _seen(self, record: Record) -> str | None:
        return local_processes.state(record.pid, record.born) if record.machine == self._me.machine else None

    def _unreachable(self, now: float) -> Verdict | None:
        if self.process == 0 or not self._trouble or now - self._read < min(UNREACHABLE, self.bound * PATIENCE):
            return None
        name = self._records.get(0, "process 0")
        return Verdict(
            0, f"{name} cannot be reached: it keeps the store through which all processes speak. JAX says: {self._trouble}"
        )

    def _absent(self, now: float) -> Verdict | None:
        if now - self._begun < self.bound * BEFORE_THE_FIRST_STEP:
            return None
        absent = [process for process in range(self.processes) if process not in self._records]
        return Verdict(absent[0], f"process {absent[0]} has never been heard of.") if absent else None
