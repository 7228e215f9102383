"""Folders of the local disk, each written as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from unisono._src.keras.checkpoint.storage import Files

UNFINISHED = ".unfinished"
"""The end of the name of a folder that is being written, or removed."""


class LocalPlace(PosixPath):
    """A path of the local disk. A folder has another name until it is whole."""

    def list_names(self) -> list[str]:
        try:
            return sorted(os.listdir(self))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_folder(self) -> bool:
        return self.is_dir()

    def is_there(self) -> bool:
        return os.path.lexists(self)

    def find_folder(self) -> LocalPlace:
        return next(folder for folder in [self, *self.parents] if folder.is_dir())

    def open_file(self) -> BufferedReader:
        return self.open("rb")

    def read_write_time(self) -> int:
        try:
            return self.stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def write_folder(self, files: Files) -> None:
        unfinished = self.name_unfinished()
        unfinished.mkdir(parents=True)
        try:
            for name, write in files.items():
                with open_synced(unfinished / name) as file:
                    write(file)
            sync(unfinished)
            unfinished.rename(self)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        sync(self.parent)

    def remove_folder(self) -> None:
        shutil.rmtree(self.rename(self.name_unfinished()))

    def remove_unfinished(self) -> None:
        if self.name_unfinished().exists():
            shutil.rmtree(self.name_unfinished())

    def remove_if_empty(self) -> None:
        if self.is_dir() and not self.list_names():
            self.rmdir()

    def name_unfinished(self) -> LocalPlace:
        return self.with_name(f"{self.name}{UNFINISHED}")

    def describe_failure(self, error: BaseException, wanted: int) -> str | None:
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.ENOSPC:
            return f"the disk is full: {wanted} bytes wanted, {shutil.disk_usage(self.find_folder()).free} free"
        if number == errno.EDQUOT:
            return f"the disk quota is used up: {wanted} bytes wanted"
        if number == errno.EFBIG:
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            most = "the file system" if limit == resource.RLIM_INFINITY else f"the limit of {limit} bytes (ulimit -f)"
            return f"a file is larger than {most} allows: {wanted} bytes wanted"
        return None


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
