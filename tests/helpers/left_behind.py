"""What a test may leave behind in its process: nothing that the next test, or a user's program, would notice."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import pathlib
import signal
import sys
import threading
import time
import types
from collections.abc import Mapping, ValuesView
from typing import Any

import jax
import keras
import numpy as np

import unisono as un

PATIENCE = 5.0
"""Seconds that threads and processes which were told to end have for it."""

POOLS = ("asyncio_", "ThreadPoolExecutor", "ocdbt", "grain", "tokio", "pydevd", "fsspecIO")
"""Threads of pools that libraries make once, and keep for as long as the process lives. None of the engine's threads is of a pool."""

PACKAGES = ("keras", "jax", "jaxlib")
"""Their classes and modules stay as they are."""

TASKS = pathlib.Path("/proc/self/task")
"""The threads of this process."""

MISSING = object()


class Found:
    """What there is at one moment."""

    def __init__(self) -> None:
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self.threads = set(threading.enumerate())
        self.children = children()
        self.settings = settings()

    def left(self, after: Found) -> list[str]:
        """Sentences about what `after` has, and this has not."""
        return [
            *differences("environment variable", self.environment, after.environment),
            *differences("setting", self.settings, after.settings),
            *[f"a thread runs on: {thread}" for thread in after.threads - self.threads if is_of_test(thread)],
            *[f"a child process runs on: {of}" for of in after.children - self.children],
        ]


def after_a_while(before: Found) -> list[str]:
    """What a test has left behind, of threads and processes what did not end by itself."""
    end = time.monotonic() + PATIENCE
    while True:
        left = before.left(Found())
        if not any("runs on" in line for line in left) or time.monotonic() > end:
            return left
        time.sleep(0.02)


def is_of_test(thread: threading.Thread) -> bool:
    return thread.is_alive() and not thread.name.startswith(POOLS)


def children() -> set[str]:
    """The processes that this one has started and that still run, on Linux."""
    found = set()
    if not TASKS.is_dir() or not has_children():  # one question, where JAX has a hundred threads to look through
        return found
    for path in TASKS.glob("*/children"):
        try:
            ids = path.read_text().split()
        except OSError:  # the thread has ended
            continue
        found |= {line for line in map(command_line, ids) if line}
    return found


def has_children() -> bool:
    """Whether any thread has a child process, one that has ended and was not waited for included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def command_line(process: str) -> str:
    """Nothing for a process that has ended, or that Python itself has started to look after shared memory."""
    here = pathlib.Path("/proc", process)
    try:
        has_ended = here.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z"
        line = here.joinpath("cmdline").read_text().replace("\0", " ").strip()  # empty for a moment after the start
    except OSError:
        return ""
    return "" if has_ended or "resource_tracker" in line else f"{process}: {line}"


def settings() -> dict[str, Any]:
    """What holds for the whole process."""
    of_jax = {f"jax.config.{name}": value for name, value in jax.config.values.items()}  # pyright: ignore[reportAttributeAccessIssue]
    numbers = [number for number in signal.Signals if number != signal.SIGALRM]  # that is pytest-timeout's
    of_python = {f"signal {number.name}": signal.getsignal(number) for number in numbers}
    return of_jax | of_python | {
        "keras' dtype policy": keras.config.dtype_policy().name,
        "keras' floatx": keras.config.floatx(),
        "keras' epsilon": keras.config.epsilon(),
        "keras' image data format": keras.config.image_data_format(),
        "keras' traceback filtering": keras.config.is_traceback_filtering_enabled(),
        "keras' interactive logging": keras.config.is_interactive_logging_enabled(),
        "keras' distribution": keras.distribution.distribution(),
        "numpy's treatment of errors": tuple(sorted(np.geterr().items())),
        "the working directory": os.getcwd(),
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "the level of the root logger": logging.getLogger().level,
        "the replicas of the strategy outside of every scope": un.get_strategy().num_replicas_in_sync,
    }  # fmt: skip


class Namespaces:
    """The classes and modules of Keras and JAX that were imported, and what their names stand for: a class that was changed and changed
    back is unchanged."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, type | types.ModuleType, dict[str, Any]]] = {}
        self._values: list[ValuesView[Any]] = []
        self._before: list[Any] = []
        self._modules = 0
        self.note_new()

    def note_new(self) -> None:
        """Take note of what was imported since."""
        if len(sys.modules) == self._modules:
            return
        self._modules = len(sys.modules)
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in PACKAGES and module is not None:
                if "._src" not in name:
                    self._note(name, module)
                for value in list(vars(module).values()):
                    if isinstance(value, type) and value.__module__.partition(".")[0] in PACKAGES:
                        self._note(f"{value.__module__}.{value.__qualname__}", value)
        self._remember()

    def _note(self, name: str, owner: type | types.ModuleType) -> None:
        if id(owner) not in self._known:
            self._known[id(owner)] = name, owner, dict(vars(owner))
            self._values.append(vars(owner).values())

    def _remember(self) -> None:
        """All values one after another: comparing them at once takes a third of the time that it takes one owner after another."""
        self._before = [value for _, _, before in self._known.values() for value in before.values()]

    def changed(self) -> list[str]:
        """The names that stand for something else than before, or that are new; each is told once."""
        values = list(itertools.chain.from_iterable(self._values))
        if len(values) == len(self._before) and all(map(operator.is_, values, self._before)):
            return []
        found = []
        for key, (where, owner, before) in self._known.items():
            now = vars(owner)
            if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            names = [name for name in {**before, **now} if now.get(name, MISSING) is not before.get(name, MISSING)]
            found += [f"{where}.{name} was changed" for name in names if counts(owner, name, now.get(name))]
            self._known[key] = where, owner, dict(now)
        self._remember()
        return found


def counts(owner: type | types.ModuleType, name: str, value: Any) -> bool:
    """Whether a change is one: not what Python keeps in a class, and not what a module imports or remembers."""
    if isinstance(owner, type):
        return name not in ("__slotnames__", "__annotations__", "ifrt_device_iterator")  # the last is made at its first use
    return callable(value) and not isinstance(value, types.ModuleType)


def differences(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**before, **after} if before.get(name, MISSING) != after.get(name, MISSING)]
    return [f"{kind} {name}: {before.get(name)!r} before, {after.get(name)!r} after" for name in names]
