"""Calls of the kernel that runs a loop over steps.

It runs a program of instructions, for some rows at a time. The words for operations and for places are those of
`native/row_loop.cc`, in the same order: their numbers are what the kernel reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

OPERATIONS = (
    "copy", "load truth", "store truth", "product", "select",
    "add", "subtract", "multiply", "divide", "larger", "smaller",
    "equal", "unequal", "less", "less or equal",
    "negate", "absolute", "exponential", "tangent", "logistic", "square root",
)  # fmt: skip

KINDS = ("number", "shared", "fixed", "place", "carry", "next", "result", "kept", "local")
"""Where an operand lies: a number, a row for all rows, rows for all steps, rows of one step, ..."""


class Address(NamedTuple):
    """Where an instruction reads or writes."""

    kind: str = "number"
    number: int = 0
    offset: int = 0
    """The first element in a row."""
    is_number: bool = False
    """Whether one element is read for the whole row."""

    def encode(self) -> list[int]:
        return [KINDS.index(self.kind), self.number, self.offset, int(self.is_number)]


NOTHING = Address()


class Matrix(NamedTuple):
    """The right operand of a matmul."""

    number: int
    depth: int

    def encode(self) -> list[int]:
        return [0, self.number, self.depth, 0]


class Instruction(NamedTuple):
    """One operation on `width` elements of each row."""

    operation: str
    width: int
    to: Address
    a: Address
    b: Address | Matrix = NOTHING
    c: Address = NOTHING

    def encode(self) -> list[int]:
        words = [OPERATIONS.index(self.operation), self.width]
        return [*words, *self.to.encode(), *self.a.encode(), *self.b.encode(), *self.c.encode()]


class RowProgram(NamedTuple):
    """The program of one step."""

    instructions: Sequence[Instruction]
    numbers: Sequence[float]
    transposed: Sequence[bool]
    """Whether each matrix is transposed."""
    kept_widths: Sequence[int]
    local_widths: Sequence[int]


class LoopArrays(NamedTuple):
    """The arrays that a loop reads, by kind of access."""

    carries: Sequence[Array]
    places: Sequence[Array]
    fixed: Sequence[Array]
    shared: Sequence[Array]
    matrices: Sequence[Array]


def call_row_loop(
    program: RowProgram, steps: int, is_reversed: bool, arrays: LoopArrays, results: Sequence[jax.ShapeDtypeStruct]
) -> list[Array]:
    """Run the loop. The results are the last carries, then the results of all steps."""
    lasts = [jax.ShapeDtypeStruct(carry.shape, carry.dtype) for carry in arrays.carries]
    counts = [*map(len, arrays), len(results)]
    call = jax.ffi.ffi_call("unisono_run_row_loop", [*lasts, *results])
    outputs = call(
        *(array for group in arrays for array in group),
        counts=np.array(counts, np.int64),
        rows=np.int64(lasts[0].shape[0]),
        steps=np.int64(steps),
        is_reversed=is_reversed,
        program=np.array([instruction.encode() for instruction in program.instructions], np.int64).reshape(-1),
        numbers=np.array(program.numbers, np.float32),
        transposed=np.array(program.transposed, np.int64),
        kept_widths=np.array(program.kept_widths, np.int64),
        local_widths=np.array(program.local_widths, np.int64),
    )
    return list(outputs)
