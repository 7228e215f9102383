"""Folders of a storage that fsspec opens, such as S3. It has no rename: a folder is there when its record is, which is put last."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import fsspec

from unisono._src.keras.checkpoint import storage
from unisono._src.keras.checkpoint.storage import ARRAYS, RECORD, Files, StorageError, summarize_error


def find_remote_place(protocol: str, path: str) -> RemotePlace:
    """Find a place by its protocol. The driver of the protocol is imported."""
    url = f"{protocol}://{path}"
    try:
        if "::" in url:
            raise ValueError("a chain of protocols keeps what others do not see")
        return RemotePlace(url, fsspec.url_to_fs(url)[0])
    except ValueError as error:
        raise ValueError(
            f"The path {url!r} was received, which fsspec does not open ({error}). Write a path of the local disk, or one like "
            f'"s3://bucket/run".'
        ) from error


@dataclasses.dataclass(frozen=True)
class RemotePlace:
    """A key of a storage, and all keys below it."""

    url: str
    filesystem: fsspec.AbstractFileSystem = dataclasses.field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePlace:
        above = self.url.rpartition("/")[0]
        return self if above.endswith(":/") else RemotePlace(above, self.filesystem)

    def __truediv__(self, name: str) -> RemotePlace:
        return RemotePlace(f"{self.url}/{name}", self.filesystem)

    @contextlib.contextmanager
    def asking(self) -> Iterator[fsspec.AbstractFileSystem]:
        """Ask the storage, and not a listing that the driver has kept. Drivers raise errors of many classes, and this one."""
        try:
            self.filesystem.invalidate_cache()
            yield self.filesystem
        except (FileNotFoundError, StorageError):
            raise
        except Exception as error:
            raise StorageError(f"The storage of {self} failed: {summarize_error(error).rstrip('.')}.") from error

    def list_names(self) -> list[str]:
        try:
            with self.asking() as filesystem:
                found: list[str] = filesystem.ls(self.url, detail=False)
        except FileNotFoundError:
            return []
        itself = self.filesystem._strip_protocol(self.url)  # a file lists itself, and a folder may have a file of its own name
        return sorted({path.rstrip("/").rpartition("/")[2] for path in found if path.rstrip("/") != itself})

    def is_folder(self) -> bool:
        return self.parent == self or self.list_names() not in ([], [ARRAYS])

    def is_there(self) -> bool:
        return self.is_folder() or self.filesystem.isfile(self.url)

    def find_folder(self) -> RemotePlace:
        return self if self.is_folder() else self.parent.find_folder()

    def open_file(self) -> io.BufferedReader:
        return io.BufferedReader(RemoteFile(self))

    def read_write_time(self) -> int:
        try:
            with self.asking() as filesystem:
                return round(filesystem.modified(self.url).timestamp() * 1e9) if filesystem.isfile(self.url) else 0
        except FileNotFoundError:
            return 0

    def write_folder(self, files: Files) -> None:
        if RECORD in self.list_names():
            raise FileExistsError(f"{self} is there already")
        try:
            with self.asking() as filesystem:
                for name, write in files.items():
                    if name != RECORD:
                        with filesystem.open(f"{self}/{name}", "wb") as file:
                            write(cast(BinaryIO, file))
                record = io.BytesIO()
                files[RECORD](record)
                filesystem.pipe_file(f"{self}/{RECORD}", record.getvalue())  # in one put: it is whole, or not there
        except BaseException as error:
            with contextlib.suppress(OSError):  # else the next writer does
                self.remove_unfinished()
            if isinstance(error, FileNotFoundError):
                raise StorageError(f"The storage of {self} failed: {summarize_error(error).rstrip('.')}.") from error
            raise

    def remove_folder(self) -> None:
        with self.asking() as filesystem:
            for name in sorted(self.list_names(), key=lambda name: name != RECORD):
                filesystem.rm_file(f"{self}/{name}")

    def remove_unfinished(self) -> None:
        if self.list_names() == [ARRAYS]:
            with self.asking() as filesystem:
                filesystem.rm_file(f"{self}/{ARRAYS}")

    def remove_if_empty(self) -> None:
        """Do nothing: a folder of keys is gone with its last key."""

    def describe_failure(self, error: BaseException, wanted: int) -> str | None:
        if not isinstance(error, StorageError):
            return None
        return f"the storage failed ({summarize_error(error.__cause__ or error)}): {wanted} bytes wanted"


class RemoteFile(io.RawIOBase):
    """A file of a storage, opened for reading. If the storage fails, its error says so: the bytes of the file may be good."""

    def __init__(self, place: RemotePlace) -> None:
        self._place = place
        self._file: Any = None
        with place.asking() as filesystem:
            self._file = filesystem.open(place.url, "rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        with self._place.asking():
            content: bytes = self._file.read(min(len(buffer), storage.AT_ONCE))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if self._file is not None:  # Python closes a file that was not opened, too
            self._file.close()
        super().close()
