"""One worker process: its output, its process group, and how it ended."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from unisono._src.processes.launch.outcome import ProcessEnd
from unisono._src.processes.launch.output import Screen, WorkerOutput, find_last_traceback
from unisono._src.processes.watch import local_processes

CHUNK = 65536
"""Bytes of one read."""


class WorkerProcess:
    """A worker in a process group of its own.

    Ctrl-C at a terminal reaches the launcher, which passes it on once. Processes that the worker has started end with it.

    The selector waits for its output. The data of a key is the function that reads it.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        screen: Screen,
        selector: selectors.BaseSelector,
    ) -> None:
        self._number = number
        self._selector = selector
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._error = WorkerOutput(screen, screen.err, number)
        self._outputs = {self._process.stdout: WorkerOutput(screen, screen.out, number), self._process.stderr: self._error}
        for pipe in self._outputs:
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, functools.partial(self._read, pipe))

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def is_stopped(self) -> bool:
        """Whether the worker is stopped, by SIGSTOP or at a terminal. Ask only before its end was seen."""
        return local_processes.read_status(self._process.pid)[:1] == ["T"]

    def send(self, number: int) -> None:
        """Send a signal to the worker, not to its child processes."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the worker and all processes that it has started. Some may be left when the worker has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def finish(self, forced: bool, was_stopped: bool) -> ProcessEnd:
        """Kill what is left of the worker, and read its last output.

        There is no wait for more output: a process that the worker left behind may hold the pipes open.
        """
        self.kill()
        status = self._process.wait()
        for pipe, output in self._outputs.items():
            while self._read(pipe):
                pass
            output.close()
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            pipe.close()
        return ProcessEnd(self._number, status, forced, tuple(find_last_traceback(list(self._error.last))), was_stopped)

    def _read(self, pipe: IO[bytes]) -> bool:
        """Read one chunk; whether more may follow."""
        content = pipe.read(CHUNK)  # None if nothing has come yet, empty at the end
        if content:
            self._outputs[pipe].feed(content)
        elif content is not None and pipe in self._selector.get_map():
            self._selector.unregister(pipe)
        return bool(content)
