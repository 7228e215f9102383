"""A write for which there was no room: on the disk, in a quota, or within a limit on the size of files."""

from __future__ import annotations

import errno
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
"""How TensorStore quotes the number of an error of the system, in errors of other classes."""


class FullDiskError(OSError):
    """A checkpoint was not written, since there is no room for it. The one before it is as it was."""


def describe_lack_of_room(error: BaseException, directory: Path, wanted: int) -> str | None:
    """Return what to say of a failed write of so many bytes; None where it was not for lack of room."""
    number = next(find_error_numbers(error), None)
    if number == errno.ENOSPC:
        return f"the disk is full: {wanted} bytes wanted, {shutil.disk_usage(find_folder(directory)).free} free"
    if number == errno.EDQUOT:
        return f"the disk quota is used up: {wanted} bytes wanted"
    if number == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = "the file system" if limit == resource.RLIM_INFINITY else f"the limit of {limit} bytes (ulimit -f)"
        return f"a file is larger than {most} allows: {wanted} bytes wanted"
    return None


def find_error_numbers(error: BaseException | None) -> Iterator[int]:
    """Yield the numbers by which the system names an error, of the error and of its causes."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            yield error.errno
        yield from (int(number) for number in OS_ERROR.findall(str(error)))
        error = error.__cause__ or error.__context__


def find_folder(path: Path) -> Path:
    """Return a folder, or the nearest above it that is there."""
    return next(folder for folder in [path, *path.parents] if folder.is_dir())
