"""One started process: its output, its group, and how it ended."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Mapping, Sequence

from unisono._src.cluster.launch.output import Screen, WorkerOutput
from unisono._src.cluster.watch import local_processes

CHUNK = 65536
"""Bytes of one read."""


class WorkerProcess:
    """A worker in a process group of its own: Ctrl-C at a terminal reaches the launcher, which passes it on once, and processes that the
    worker has started end with it."""

    def __init__(self, number: int, command: Sequence[str], environment: Mapping[str, str], screen: Screen) -> None:
        self.number = number
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.error = WorkerOutput(screen, screen.err, number)
        self._streams = {
            self._process.stdout.fileno(): WorkerOutput(screen, screen.out, number),
            self._process.stderr.fileno(): self.error,
        }
        for descriptor in self._streams:
            os.set_blocking(descriptor, False)
        self._born = local_processes.read_start_time(self._process.pid)

    def register_output(self, selector: selectors.BaseSelector) -> None:
        """Have the selector wait for output. The data of its key is the function that reads it."""
        for descriptor in self._streams:
            selector.register(descriptor, selectors.EVENT_READ, lambda descriptor=descriptor: self._read(descriptor, selector))

    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def is_stopped(self) -> bool:
        """Return whether the worker is stopped, by SIGSTOP or at a terminal."""
        return local_processes.read_process_state(self._process.pid, self._born) == local_processes.STOPPED

    @property
    def code(self) -> int:
        """Return the exit code as a shell counts it: 128 and the number of the signal, where there was one."""
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    @property
    def signal(self) -> signal.Signals | None:
        """Return the signal that killed the worker."""
        return signal.Signals(-self._process.returncode) if self._process.returncode < 0 else None

    def send(self, number: int) -> None:
        """Send a signal to the worker alone, not to the processes that it has started."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the worker and all processes that it has started. Some may be left when the worker has ended."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def finish(self, selector: selectors.BaseSelector) -> None:
        """Read what is left of the output of an ended worker, without waiting for more: a process that it left behind may hold the pipes
        open."""
        self.kill()
        self._process.wait()
        for descriptor, stream in self._streams.items():
            while self._read(descriptor, selector):
                pass
            stream.close()
        for descriptor in self._streams:
            if descriptor in selector.get_map():
                selector.unregister(descriptor)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def _read(self, descriptor: int, selector: selectors.BaseSelector) -> bool:
        """Read one chunk, and return whether more may follow."""
        try:
            content = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        if content:
            self._streams[descriptor].feed(content)
        elif descriptor in selector.get_map():
            selector.unregister(descriptor)
        return bool(content)
