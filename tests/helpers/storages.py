"""Storages for tests of checkpoints: folders, keys in memory, and keys in a memory that fails or is lost after some calls."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from unisono._src.keras.checkpoint.local_storage import LocalPlace
from unisono._src.keras.checkpoint.remote_storage import RemotePlace
from unisono._src.keras.checkpoint.storage import Place, find_place

NAMES = ("disk", "memory")


@contextlib.contextmanager
def storage(name: str, folder: pathlib.Path) -> Iterator[Place]:
    """Yields an empty directory, of the disk or of a memory."""
    yield find_place(folder if name == "disk" else f"memory://{folder.name}")
    MemoryFileSystem.store.clear()


def write(place: Place, content: bytes) -> None:
    """Writes a file, as somebody else would."""
    if isinstance(place, RemotePlace):
        place.filesystem.pipe_file(place.url, content)
    else:
        LocalPlace(place).parent.mkdir(parents=True, exist_ok=True)
        LocalPlace(place).write_bytes(content)


def remove(place: Place) -> None:
    """Removes a file, as somebody else would."""
    if isinstance(place, RemotePlace):
        place.filesystem.rm_file(place.url)
    else:
        LocalPlace(place).unlink()


def list_names(path: str | os.PathLike[str]) -> list[str]:
    return find_place(path).list_names()


class KilledError(BaseException):
    """Stands for the end of the process: no handler for errors takes it."""


class Calls:
    """How many more calls the failing storage takes, and what the others raise."""

    left: float = float("inf")
    error: BaseException = ConnectionError("the connection is lost")
    once = False

    @classmethod
    def take(cls) -> None:
        cls.left -= 1
        if cls.left < 0:
            if cls.once:
                cls.left = float("inf")
            raise cls.error


class FailingFile(MemoryFile):
    most = 0
    """The most bytes that a call wrote."""

    def write(self, content) -> int:
        Calls.take()
        FailingFile.most = max(FailingFile.most, len(content))
        return super().write(content)


class FailingFileSystem(MemoryFileSystem):
    """Keys in memory, "failing://". A file that is being written is there at once, in parts: that is more than any storage of objects leaves.

    `Calls` says when it fails.
    """

    protocol = "failing"
    store: dict = {}  # noqa: RUF012  # as its base has it
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("failing://"))

    def ls(self, path, detail=True, **kwargs):
        Calls.take()
        return super().ls(path, detail, **kwargs)

    def rm_file(self, path):
        Calls.take()
        self.store.pop(self._strip_protocol(path))

    def pipe_file(self, path, value, **kwargs):
        Calls.take()
        self.store[self._strip_protocol(path)] = MemoryFile(self, self._strip_protocol(path), value)

    def _open(self, path, mode="rb", **kwargs):
        Calls.take()
        if mode == "rb":
            return super()._open(path, mode, **kwargs)
        self.store[path] = FailingFile(self, path)
        return self.store[path]


fsspec.register_implementation("failing", FailingFileSystem, clobber=True)


@contextlib.contextmanager
def failing_storage() -> Iterator[Place]:
    """Yields an empty directory of it."""
    try:
        yield find_place("failing://bucket/run")
    finally:
        FailingFileSystem.store.clear()
        FailingFile.most = 0


@contextlib.contextmanager
def failing_after(calls: int, error: BaseException = Calls.error, once: bool = False) -> Iterator[None]:
    """Lets it take so many calls within the block. The call after them fails, and so do all others, or none of them."""
    before = Calls.error
    Calls.left, Calls.error, Calls.once = calls, error, once
    try:
        yield
    finally:
        Calls.left, Calls.error, Calls.once = float("inf"), before, False
