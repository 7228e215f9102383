"""Where checkpoints lie: what a storage does for them, and which storage a path names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from io import BufferedReader
from typing import BinaryIO, Protocol, TypeAlias

from unisono._src.keras.checkpoint.local_storage import LocalPlace

ARRAYS = "arrays.npz"
RECORD = "record.json"
"""The files of a checkpoint. The record is written last, and removed first."""

AT_ONCE = 2**24
"""The most bytes of one call: a driver copies what it is given, and so an array is never there a second time."""

Files: TypeAlias = Mapping[str, Callable[[BinaryIO], None]]
"""What writes the files of a folder, by name, in the order of writing."""


class StorageError(OSError):
    """A storage failed: no room, no permission, no connection. The checkpoints in it are as they were."""


class Place(Protocol):
    """A folder or a file of a storage. Nothing else in this room touches a disk or a network.

    It knows nothing of what is in a file. A folder that a writer has not finished is not there. Process 0 writes, and every process reads,
    in the thread that trains and in the one that writes. What fails is an OSError.
    """

    def __fspath__(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> Place:
        """The folder that it is in. It is the place itself at the root of a storage."""
        ...

    def __truediv__(self, name: str, /) -> Place: ...

    def list_names(self) -> list[str]:
        """List the names of what is in a folder, unfinished folders included. There are none without a folder."""
        ...

    def is_folder(self) -> bool: ...

    def is_there(self) -> bool:
        """Whether there is anything. A broken link counts."""
        ...

    def find_folder(self) -> Place:
        """Find this folder, or the nearest existing one above it."""
        ...

    def open_file(self) -> BufferedReader:
        """Open a file for reading."""
        ...

    def read_write_time(self) -> int:
        """Read when a file was written, in nanoseconds. It is 0 if the file is gone."""
        ...

    def write_folder(self, files: Files) -> None:
        """Write a folder as a whole, or leave nothing that is there. A folder that is there is never written over."""
        ...

    def remove_folder(self) -> None:
        """Remove a folder. It is not there any more from the first moment, also if the process ends meanwhile."""
        ...

    def remove_unfinished(self) -> None:
        """Remove what an interrupted `write_folder` or `remove_folder` of this place has left."""
        ...

    def remove_if_empty(self) -> None:
        """Remove a folder with nothing in it."""
        ...

    def describe_failure(self, error: BaseException, wanted: int) -> str | None:
        """Describe why a write of `wanted` bytes below this folder failed. It is None if it was not for the storage's sake."""
        ...


def find_place(path: str | os.PathLike[str]) -> Place:
    """Find the place that a path names: of the local disk, or with a protocol as in "s3://bucket/run" of another storage.

    >>> find_place("/tmp/../run/").name, find_place("file:///run").parent.name
    ('run', '')
    """
    text = os.fspath(path)
    protocol, separator, rest = text.partition("://")
    if re.match(r"[a-z][a-z0-9+.-]+:/(?!/)", text):
        raise ValueError(
            f"The path {text!r} was received. A protocol has two slashes, of which pathlib.Path drops one. Write the path as a text, with "
            f'"://" in it; or "./" before a local folder of this name.'
        )
    if not separator or "/" in protocol:
        return LocalPlace(text).absolute()
    if protocol == "file":
        return LocalPlace(rest).absolute()
    try:
        from unisono._src.keras.checkpoint.remote_storage import find_remote_place  # it imports fsspec

        return find_remote_place(protocol, rest.rstrip("/"))
    except ImportError as error:
        raise ImportError(
            f"The path {text!r} was received. Its protocol needs fsspec and a driver ({error}), and a path of the local disk needs neither. "
            f'The driver of s3:// comes by: pip install "unisono[s3]"'
        ) from error


def summarize_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else 'no text'}"
