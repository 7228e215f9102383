"""The watch of one process: its heartbeats, the others', and its verdict."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

import jax

from unisono._src.processes.activity import WORKING, Activity
from unisono._src.processes.watch import local_processes
from unisono._src.processes.watch.board import DONE, ENDED, RAISED, RUNNING, Board, Heartbeat, Verdict
from unisono._src.processes.watch.verdict import BEFORE_THE_FIRST_STEP, PATIENCE, Observation, judge_processes, make_error_verdict
from unisono._src.programs.private import distributed

OFTEN = 10
"""Heartbeats in a bound."""

LONGEST_INTERVAL = 2.0
"""Seconds."""

SOON = 0.05
"""Seconds between two heartbeats until all processes have been heard of."""

LONGEST_ERROR = 300
"""The longest text of an error that is sent, in characters."""

UNREACHABLE = 3.0
"""Seconds after which failing calls are no hiccup of the network. JAX, which does not wait at all, aborts after six (`delay_aborts`)."""

NOT_THE_PROGRAM = ("processes/launch/worker.py", "<frozen runpy>")


class ProcessWatch(Activity):
    """The main thread's activity, and two threads that watch the others.

    One thread talks to the other processes, one judges them. The talking thread waits for process 0, for minutes if that is stopped; so
    another thread judges.

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
        self.process = process
        self.board = Board(client)
        self.state = RUNNING
        self.is_decided = threading.Event()
        """A verdict is known, and this process leaves by itself."""
        self.all_met = threading.Event()
        """All processes have been heard of."""
        self._processes = processes
        self._client = client
        self._error = ""
        self.thread = threading.get_ident()
        """The thread that trains, whose stack is shown. It is the main one, unless the program trains in another."""
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

    def rest(self, seconds: float) -> None:
        """Stop, and wait `seconds` at most for each thread.

        A thread that is in JAX' code when the interpreter ends aborts the process, unless its call never returns.
        """
        self._over.set()
        self._news.set()
        for thread in self._threads:
            thread.join(seconds)

    def publish_state(self, state: str) -> None:
        """Tell the others of a new state, at once."""
        self.state = state
        self._news.set()

    def fail(self, error: BaseException) -> Verdict:
        """Note that this error ended the program, and make the verdict."""
        self._error = f"{type(error).__name__}: {error}".partition("\n")[0][:LONGEST_ERROR].rstrip(": ")
        self.publish_state(RAISED)
        return make_error_verdict(self.make_heartbeat())

    def make_heartbeat(self) -> Heartbeat:
        """Build the heartbeat of this process now."""
        seconds = time.monotonic() - self.moved_at
        stack = format_stack(self.thread) if self.phase == WORKING and seconds > self.bound * PATIENCE / 2 else ""
        words = self._error or self.doing
        return dataclasses.replace(
            self._own_heartbeat, step=self.step, state=self.state, phase=self.phase, seconds=seconds, words=words, stack=stack
        )

    def others_are_done(self) -> bool:
        """Whether no other process waits for this process any more."""
        return self._all_others(lambda other: other.heartbeat.state in DONE or other.seen == local_processes.GONE)

    def others_have_ended(self) -> bool:
        """Whether all others have ended their programs. JAX may then disconnect from them."""
        return self._all_others(lambda other: other.heartbeat.state == ENDED)

    def others_are_gone(self) -> bool:
        """Whether no other process reads the store any more. A silent process does not read it."""
        longest_silence = 3 * self.interval + 1.0
        others = self._observe_others(time.monotonic())
        return all(other.seen == local_processes.GONE or other.silence > longest_silence for other in others)

    def _all_others(self, condition: Callable[[Observation], bool]) -> bool:
        others = self._observe_others(time.monotonic())
        return len(others) == self._processes - 1 and all(map(condition, others))

    def _observe_others(self, now: float) -> list[Observation]:
        """Collect what is known of the others.

        Silence counts up to the last read of the store. Process 0 keeps the store, so its silence counts up to now.
        """
        return [
            Observation(
                heartbeat,
                (now if process == 0 else self._store_read_at) - self._heard_at.get(process, now),
                local_processes.read_process_state(heartbeat.pid, heartbeat.born)
                if heartbeat.machine == self._own_heartbeat.machine
                else None,
            )
            for process, heartbeat in sorted(self._heartbeats.items())
            if process != self.process
        ]

    def _talk(self) -> None:
        while not self._over.is_set():
            self._news.clear()
            try:
                self._own_heartbeat = dataclasses.replace(self._own_heartbeat, beat=self._own_heartbeat.beat + 1)
                self.board.publish_heartbeat(self.make_heartbeat())
                self._note_heard(self.board.read_heartbeats(), self.board.read_verdict())
            except jax.errors.JaxRuntimeError as error:  # process 0 did not answer
                if distributed.get_client() is not self._client:
                    self._over.set()  # the program has disconnected
                    return
                self._store_error = str(error).partition("\n")[0] or type(error).__name__
            self._news.wait(self.interval if self.all_met.is_set() else SOON)

    def _note_heard(self, heartbeats: dict[int, Heartbeat], verdict: Verdict | None) -> None:
        now = time.monotonic()
        for process, heartbeat in heartbeats.items():
            if process not in self._heartbeats or self._heartbeats[process].beat != heartbeat.beat:
                self._heard_at[process] = now
        self._heartbeats = heartbeats
        self._verdict = verdict
        self._store_read_at = now
        self._store_error = ""
        if len(heartbeats) == self._processes:
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
            verdict = (
                self._verdict
                or judge_processes(self.make_heartbeat(), self._observe_others(now), self.bound, self.interval, stopped)
                or self._find_unreachable(now)
                or self._find_absent(now)
            )
            if verdict is not None:
                answer(self, verdict)
                return

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
        absent = [process for process in range(self._processes) if process not in self._heartbeats]
        return Verdict(absent[0], f"process {absent[0]} has never been heard of.") if absent else None


def format_stack(thread: int) -> str:
    """Format a thread's stack like a traceback. It begins with the program's first line, and is empty if the thread has ended."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    frames = [summary for summary in traceback.extract_stack(frame) if not summary.filename.endswith(NOT_THE_PROGRAM)]
    return "".join(traceback.format_list(frames))
