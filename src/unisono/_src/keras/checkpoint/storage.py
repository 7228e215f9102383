"""Folders of bytes, each written as a whole or not at all. No other file of this room touches the disk.

It knows nothing of arrays or checkpoints: another storage would take the place of these functions.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, TypeAlias

UNFINISHED = ".unfinished"
"""The end of the name of a folder that is being written, or removed."""

OpenFile: TypeAlias = Callable[[str], AbstractContextManager[BinaryIO]]
"""Opens a new file of a folder for writing, by its name."""


class FullDiskError(OSError):
    """A checkpoint was not written, since there is no room for it. The one before it is as it was."""


def write_folder(path: Path, write: Callable[[OpenFile], None]) -> None:
    """Write a folder as a whole, or leave nothing of it.

    It has another name until all its bytes are on the disk. So no half folder is left if the process or the machine ends.
    """
    unfinished = name_unfinished(path)
    unfinished.mkdir(parents=True)
    try:
        write(lambda name: open_synced(unfinished / name))
        sync(unfinished)
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync(path.parent)


@contextlib.contextmanager
def open_synced(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing. Its bytes are on the disk at the end of the block."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync files alone
            raise
    finally:
        os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Remove a folder; an interruption leaves nothing that has its name."""
    shutil.rmtree(path.rename(name_unfinished(path)))


def remove_unfinished(path: Path) -> None:
    """Remove what an interrupted `write_folder` or `remove_folder` of this path has left."""
    if name_unfinished(path).exists():
        shutil.rmtree(name_unfinished(path))


def remove_if_empty(folder: Path) -> None:
    if is_folder(folder) and not list_names(folder):
        folder.rmdir()


def name_unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}{UNFINISHED}")


def list_names(folder: Path) -> list[str]:
    """List the names of what is in a folder. There are none without a folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading."""
    return path.open("rb")


def is_there(path: Path) -> bool:
    """Whether there is anything at a path. A broken link counts."""
    return os.path.lexists(path)


def is_folder(path: Path) -> bool:
    return path.is_dir()


def find_folder(path: Path) -> Path:
    """Find a folder, or the nearest existing one above it."""
    return next(folder for folder in [path, *path.parents] if is_folder(folder))


def read_write_time(path: Path) -> int:
    """Read when a file was written, in nanoseconds. It is 0 if the file is gone."""
    try:
        return path.stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return 0


def describe_lack_of_room(error: BaseException, folder: Path, wanted: int) -> str | None:
    """Describe a failed write of `wanted` bytes for lack of room. It is None if the write failed for another reason."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOSPC:
        return f"the disk is full: {wanted} bytes wanted, {shutil.disk_usage(find_folder(folder)).free} free"
    if number == errno.EDQUOT:
        return f"the disk quota is used up: {wanted} bytes wanted"
    if number == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = "the file system" if limit == resource.RLIM_INFINITY else f"the limit of {limit} bytes (ulimit -f)"
        return f"a file is larger than {most} allows: {wanted} bytes wanted"
    return None
