"""One checkpoint on disk: a folder of arrays and a record.

The record holds everything but the arrays, and checks every bit of them. The arrays are members of an uncompressed zip file, as
`np.savez` writes it: `np.load` opens it. The record is JSON, and has the digests of all arrays and of itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import zipfile
from collections.abc import Mapping
from io import BufferedIOBase
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np

from unisono._src.keras.checkpoint import orbax_files, storage
from unisono._src.keras.checkpoint.storage import ARRAYS, RECORD, Place, StorageError, find_place, summarize_error
from unisono._src.processes.activity import get_activity
from unisono._src.typing import Json

FORMAT = 3

Record: TypeAlias = dict[str, Json]
"""The description of a checkpoint beside its arrays, in JSON."""


class DamagedError(ValueError):
    """A checkpoint is not what was written. Or it has a format that no code reads any more."""


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was read and found good."""

    path: Place
    arrays: dict[str, np.ndarray]
    record: Record


def write_checkpoint(path: Place, arrays: Mapping[str, np.ndarray], description: Mapping[str, Json]) -> None:
    """Write a checkpoint, as a whole or not at all."""
    described = {name: [array.shape, str(array.dtype), digest_array(array)] for name, array in arrays.items()}
    record = json.loads(json.dumps({**description, "format": FORMAT, "arrays": described}))

    def write_arrays(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                write_member(archive, name, array)

    def write_record(file: BinaryIO) -> None:
        file.write(json.dumps({**record, "seal": digest_record(record)}).encode())

    path.write_folder({ARRAYS: write_arrays, RECORD: write_record})


def write_member(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    """Write an array as `np.save` does. A dtype that NumPy does not know is written as the integers of its bits."""
    content = np.ascontiguousarray(array).reshape(array.shape)
    if content.dtype.isbuiltin != 1:
        content = content.view(f"u{content.itemsize}")
    with archive.open(name_member(name), "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, np.lib.format.header_data_from_array_1_0(content))
        whole = view_bytes(content)
        for start in range(0, len(whole), storage.AT_ONCE):
            member.write(whole[start : start + storage.AT_ONCE])


def load_checkpoint(path: str | os.PathLike[str]) -> LoadedCheckpoint:
    """Read a checkpoint and check every bit of it."""
    place = find_place(path)
    try:
        with get_activity().report_busy("reading a checkpoint"):
            record = read_record(place)
            return LoadedCheckpoint(place, read_arrays(place, record), record)
    except (DamagedError, StorageError, ImportError, MemoryError):  # what is missing here says nothing about the checkpoint
        raise
    except Exception as error:
        raise DamagedError(f"The checkpoint {place} is damaged: {summarize_error(error)}.") from error


def count_steps(path: Place) -> float:
    """Count the steps that had begun when a checkpoint was written. It is infinity if the checkpoint does not say it."""
    try:
        steps = read_record(path).get("steps") if looks_like_checkpoint(path) else None
    except StorageError:
        raise
    except (OSError, ValueError):  # no checkpoint, or one that is damaged
        return math.inf
    return steps if isinstance(steps, int) else math.inf


def looks_like_checkpoint(path: Place) -> bool:
    """Whether a folder has any file of a checkpoint. Other files may be gone."""
    return not {ARRAYS, RECORD, orbax_files.ARRAYS, orbax_files.METADATA}.isdisjoint(path.list_names())


def read_write_time(path: Place) -> int:
    """Read when a checkpoint or a Keras file was written. It is in nanoseconds, and 0 if the file is gone."""
    return max((path / name).read_write_time() for name in (RECORD, orbax_files.METADATA)) or path.read_write_time()


def read_record(path: Place) -> Record:
    """Read the record of a checkpoint, and check its bits."""
    if orbax_files.METADATA in path.list_names():
        record = orbax_files.read_record(path)
    else:
        with (path / RECORD).open_file() as file:
            record = json.load(file)
    if not isinstance(record, dict) or record.get("seal") != digest_record(record):
        raise DamagedError(f"The checkpoint {path} is damaged: its record is not what was written.")
    if record["format"] not in (FORMAT, orbax_files.FORMAT):
        raise DamagedError(
            f"The checkpoint {path} cannot be read: it has format {record['format']}, and this version of Unisono reads {orbax_files.FORMAT} "
            f"and {FORMAT}."
        )
    return record


def read_arrays(path: Place, record: Record) -> dict[str, np.ndarray]:
    """Read the arrays that a record describes, and check their bits."""
    described = record["arrays"]
    arrays = {name: np.empty(shape, np.dtype(dtype)) for name, (shape, dtype, _) in described.items()}
    if record["format"] == orbax_files.FORMAT:
        arrays = {name: np.asarray(array) for name, array in orbax_files.read_arrays(path, arrays).items()}
    else:
        with (path / ARRAYS).open_file() as file, zipfile.ZipFile(file) as archive:
            for name, array in arrays.items():
                try:
                    read_member(file, archive.getinfo(name_member(name)), array)
                except (KeyError, ValueError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
                    raise DamagedError(f"The checkpoint {path} is damaged: {name} cannot be read ({error}).") from error
    wrong = [name for name, array in arrays.items() if digest_array(array) != described[name][2]]
    if wrong:
        raise DamagedError(f"The checkpoint {path} is damaged: {wrong[0]} has other bits than were written.")
    return arrays


def read_member(file: BufferedIOBase, member: zipfile.ZipInfo, array: np.ndarray) -> None:
    """Read the bytes of an array into it.

    They are read straight from the file, since the array's digest is stronger than the zip file's checksum.
    """
    content = view_bytes(array)
    file.seek(member.header_offset + 26)
    name_size, extra_size = struct.unpack("<2H", file.read(4))
    file.seek(
        name_size + extra_size + member.file_size - len(content), os.SEEK_CUR
    )  # the record says what the header of the array does
    if file.readinto(content) != len(content):
        raise EOFError("the file is too short")


def name_member(name: str) -> str:
    return f"{name}.npy"


def view_bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def digest_array(array: np.ndarray) -> str:
    digester = hashlib.sha256(f"{array.shape} {array.dtype}\n".encode())
    digester.update(view_bytes(np.ascontiguousarray(array)))
    return digester.hexdigest()[:32]


def digest_record(record: Mapping[str, Json]) -> str:
    text = json.dumps({key: value for key, value in record.items() if key != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
