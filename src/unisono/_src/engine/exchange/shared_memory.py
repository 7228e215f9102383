"""Memory that the processes of one machine share. Each writes into its own, and reads that of the others.

Barriers keep writing and reading apart: what was written before a barrier may be read behind it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pathlib
import platform
import secrets
import time
from collections.abc import Iterable

import numpy as np

from unisono._src.processes import names
from unisono._src.processes.activity import get_activity
from unisono._src.processes.agreement import Agreement

LINE = 64
"""Bytes of a line of memory. XLA reads an array in place that begins at one."""

MOST_WORDS = 64
HEADER = 2 * LINE + 8 * MOST_WORDS
"""Bytes before the arrays: of the barrier to which the process has come, of a token that tells its memory from others, of its words."""

SPINS = 2000
PAUSE = 50e-6
"""Seconds between two looks at the barrier of another process, after so many looks without a pause."""

SHORT_LOOKS = 200
LONG_PAUSE = 1e-3
"""Seconds between two looks after so many looks with a pause: the other process computes long, or reads, and needs the cores."""

IN_ORDER = ("x86_64", "AMD64")
"""Processors on which the writes of a process are seen in their order."""

BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


class Memory:
    """The memory of one process: it writes, the others read."""

    def __init__(self, descriptor: int, is_own: bool) -> None:
        access = mmap.ACCESS_WRITE if is_own else mmap.ACCESS_READ
        everything = np.frombuffer(mmap.mmap(descriptor, 0, access=access), np.uint8)
        self.barrier = everything[:8].view(np.int64)
        """How many barriers the process has come to."""
        self.token = everything[LINE : LINE + 8].view(np.int64)
        self.words = everything[2 * LINE : HEADER].view(np.int64)
        self.room = everything[HEADER:]
        """The bytes of arrays."""


class SharedMemory:
    """The memories of all processes of one machine."""

    def __init__(self, agreement: Agreement, processes: int) -> None:
        self.number = agreement.number
        self.memories: list[Memory] = []
        """The memory of each process."""
        self.processes = processes
        self._agreement = agreement
        self._barriers = 0

    @property
    def own(self) -> Memory:
        return self.memories[self.number]

    @property
    def size(self) -> int:
        """Bytes for arrays in the memory of each process."""
        return len(self.memories[0].room)

    def open_room(self, size: int) -> bool:
        """Open shared memory of `size` bytes in each process. Say whether all processes can read one another's memory."""
        descriptor = os.memfd_create("unisono")
        os.ftruncate(descriptor, HEADER + size)
        own = Memory(descriptor, is_own=True)
        own.token[0] = secrets.randbits(62)
        own.barrier[0] = self._barriers
        handles = self._agreement.gather_values("its memory", [os.getpid(), descriptor, int(own.token[0])])
        memories = [own if number == self.number else open_memory(*handle) for number, handle in enumerate(handles)]
        are_open = self._agreement.gather_values("the memory of the others", None not in memories)
        os.close(descriptor)
        self.memories = [memory for memory in memories if memory is not None]
        return all(are_open)

    def enlarge_room(self, size: int, what: str) -> None:
        """Open larger memory in all processes. `what` needs it, which an error says."""
        if not self.open_room(size):
            raise OSError(
                f"{what} needs {size} bytes of shared memory in each process, and a process cannot open that of another any more. Set "
                f"{names.SHARED_MEMORY}=0 in all of them: they send messages then."
            )

    def meet(self, waiting: str) -> None:
        """Wait until all processes have come here. The watch ends this process where another one is lost."""
        self._barriers += 1
        self.own.barrier[0] = self._barriers
        with get_activity().report_waiting(waiting):
            for memory in self.memories:
                for look in itertools.count():
                    if memory.barrier[0] >= self._barriers:
                        break
                    os.sched_yield() if look < SPINS else time.sleep(PAUSE if look < SPINS + SHORT_LOOKS else LONG_PAUSE)


def open_shared_memory(agreement: Agreement, processes: int) -> SharedMemory | None:
    """Open memory that all processes share. It is None if they are on several machines, or cannot read one another's memory."""
    is_wanted = os.environ.get(names.SHARED_MEMORY) != "0" and platform.machine() in IN_ORDER
    machine = BOOT.read_text() if is_wanted and hasattr(os, "memfd_create") and BOOT.exists() else ""
    machines = agreement.gather_values("its machine", machine)
    if len(machines) != processes or set(machines) != {machine} or not machine:
        return None
    shared = SharedMemory(agreement, processes)
    return shared if shared.open_room(LINE) else None


def open_memory(process: int, descriptor: int, token: int) -> Memory | None:
    """Open the memory of another process.

    It is None if this process may not, or if its process numbers are other ones, as in a container.
    """
    try:
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY)
    except OSError:
        return None
    try:
        memory = Memory(opened, is_own=False)
    except (OSError, ValueError):  # of a file that is no memory
        return None
    finally:
        os.close(opened)
    return memory if memory.token[0] == token else None


def count_room(sizes: Iterable[int]) -> int:
    """Count the bytes of arrays of these sizes behind one another. Each begins at a line of memory."""
    return sum(map(round_up, sizes))


def round_up(size: int) -> int:
    """Round bytes up to whole lines of memory."""
    return -(-size // LINE) * LINE
