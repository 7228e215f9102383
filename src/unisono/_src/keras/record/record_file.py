"""The file of a record: frames that are only ever added.

A process that is killed damages the last frame at most.

A frame is its length, the CRC-32 of its content, and the content: a letter for its kind, then JSON or arrays.

    B  a run begins or goes on: its facts, in JSON
    P  a program: its name, the variables that its digests are of, the arrays of its batches, in JSON. Programs are numbered as they come.
    E  the entry of a step: the state before it, if no step has made it. This is the first state, and one that was assigned or restored
    S  steps of one program
    D  details, in JSON: a program that was traced, the first values of rows or of a state
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from unisono._src.typing import Json

NAME = "steps.record"
FORMAT = 1

HEAD = struct.Struct("<II")
STEPS = struct.Struct("<IQI")

BEGIN = b"B"
PROGRAM = b"P"
ENTRY = b"E"
STEP = b"S"
DETAIL = b"D"


class Steps(NamedTuple):
    """Steps that follow one another."""

    program: int
    """The number of their program."""
    first: int
    """The number of the first step in the model's life."""
    positions: np.ndarray
    """(step, 2), int64: pass and batch of the pass; -1 if a batch has no position."""
    rows: np.ndarray
    """(step,), int64: the rows of the global batch."""
    losses: np.ndarray
    """(step,), float32; `UNTOLD_LOSS` if a step does not tell its loss."""
    row_digests: np.ndarray
    """(step, array of the batch, lane), uint32"""
    digests: np.ndarray
    """(step, variable, lane), uint32"""

    def __len__(self) -> int:
        return len(self.rows)


DTYPES = ("<i8", "<i8", "<f4", "<u4", "<u4")
"""The dtypes of the arrays of `Steps`, in their order."""


def open_to_append(directory: Path) -> BinaryIO:
    """Open the file of a directory, behind its last whole frame. The directory is made if it is not there."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / NAME
    end = max((place for place, _ in iterate_frames(path)), default=0) if path.exists() else 0
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(end)
    file.seek(end)
    return file


def write_json(file: BinaryIO, kind: bytes, content: Json) -> None:
    write_frame(file, kind + json.dumps(content, sort_keys=True).encode())


def write_entry(file: BinaryIO, program: int, step: int, digests: np.ndarray) -> None:
    write_frame(file, ENTRY + STEPS.pack(program, step, 1) + np.ascontiguousarray(digests, "<u4").tobytes())


def write_steps(file: BinaryIO, steps: Steps) -> None:
    arrays = (np.ascontiguousarray(array, dtype).tobytes() for array, dtype in zip(steps[2:], DTYPES, strict=True))
    write_frame(file, STEP + STEPS.pack(steps.program, steps.first, len(steps)) + b"".join(arrays))


def write_frame(file: BinaryIO, content: bytes) -> None:
    """Add a frame in one write.

    A process that is killed has written it or not. The CRC finds a frame that the system wrote in part.
    """
    file.write(HEAD.pack(len(content), zlib.crc32(content)) + content)
    file.flush()


def iterate_frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """Iterate over (end of the frame, its content) for whole frames. It ends at a frame that is damaged or cut."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while len(head := file.read(HEAD.size)) == HEAD.size:
            length, checksum = HEAD.unpack(head)
            if length > size:
                return
            content = file.read(length)
            if len(content) < length or zlib.crc32(content) != checksum:
                return
            yield file.tell(), content


def read_place(content: bytes) -> tuple[int, int]:
    """Read the program's number and the first step's number. The frame is of steps, or of the entry of one."""
    program, step, _ = STEPS.unpack_from(content, 1)
    return program, step


def read_entry(content: bytes) -> np.ndarray:
    """Read the digests (variable, lane) of the entry of a step."""
    return np.frombuffer(content, "<u4", offset=1 + STEPS.size).reshape(-1, 2)


def read_steps(content: bytes, arrays: int, variables: int) -> Steps:
    """Read the steps of a frame. `arrays` of a batch and `variables` have digests."""
    program, first, count = STEPS.unpack_from(content, 1)
    shapes = (count, 2), (count,), (count,), (count, arrays, 2), (count, variables, 2)
    offset = 1 + STEPS.size
    read = []
    for shape, dtype in zip(shapes, DTYPES, strict=True):
        array = np.frombuffer(content, dtype, int(np.prod(shape)), offset).reshape(shape)
        offset += array.nbytes
        read.append(array)
    return Steps(program, first, *read)
