"""The step of a loop as instructions for rows.

It also knows where each variable is read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import Literal, Var

from unisono._src.kernels.native.row_loops import Address, Matrix
from unisono._src.programs.operands import Atom, get_dtype, get_shape
from unisono._src.typing import Shape


class NotByRowsError(Exception):
    """Why the kernel cannot run a loop. Rows meet in an equation, or there is no instruction for it."""


class Value(NamedTuple):
    """Where the rows of a variable are read."""

    source: Address | int
    """An address outside of the step, or the number of a value that the step makes."""
    width: int
    """Elements of a row; 1 also for a variable whose rows have the same number everywhere."""
    offset: int = 0


class MadeInstruction(NamedTuple):
    """An instruction before its result has an address."""

    operation: str
    width: int
    operands: tuple[Value | Matrix, ...]
    to: int | Address
    """The number of the value that it makes, or an address outside of the step."""
    offset: int = 0


def measure_row(atom: Atom) -> int:
    """Count the elements of a row."""
    return math.prod(get_shape(atom)[1:])


class RowStep:
    """The instructions of one step, while its equations are read."""

    def __init__(self, rows: int, carries: Sequence[Var], places: Collection[Var], constants: Collection[Var]) -> None:
        """Keep what the step reads. Of `places` it reads its own rows; `constants` are the same at every step."""
        self.rows = rows
        self.constants = constants
        self.instructions: list[MadeInstruction] = []
        self.widths: list[int] = []
        """The widths of the values that the step makes, by number."""
        self.numbers: list[float] = []
        self._number_values: dict[bytes, Value] = {}
        self.arrays: dict[str, dict[Var, int]] = {"place": {}, "fixed": {}, "shared": {}}
        """The arrays that are read, scanned or constant, by kind, with their numbers in it."""
        self.matrices: dict[tuple[Var, bool], int] = {}
        """The matrices of the matmuls, and whether each is transposed, with their numbers."""
        self._values = {carry: Value(Address("carry", index), measure_row(carry)) for index, carry in enumerate(carries)}
        self._places = places
        self._made: dict[tuple[object, ...], Value] = {}

    def keep(self, variable: Var, value: Value) -> None:
        """Note where a variable is read."""
        self._values[variable] = value

    def read(self, atom: Atom, shape: Shape | None = None) -> Value:
        """Find where an atom is read, as an operand for this shape."""
        wanted = get_shape(atom) if shape is None else shape
        if isinstance(atom, Literal):
            return self.read_number(float(np.asarray(atom.val).reshape(())))
        if atom in self.constants:
            return self._read_constant(atom, wanted)
        if atom in self._places:
            self.keep(atom, self._read_array("place", atom))
        value = self._values[atom]
        if get_shape(atom)[1:] != wanted[1:] and value.width != 1:
            raise NotByRowsError(f"{get_shape(atom)} is no operand for {wanted}")
        return value

    def read_number(self, number: float) -> Value:
        bits = np.float32(number).tobytes()  # 0.0 and -0.0 are two
        if bits not in self._number_values:
            self._number_values[bits] = Value(Address("number", len(self.numbers), is_number=True), 1)
            self.numbers.append(number)
        return self._number_values[bits]

    def read_matrix(self, atom: Var, is_transposed: bool) -> Matrix:
        index = self.matrices.setdefault((atom, is_transposed), len(self.matrices))
        return Matrix(index, get_shape(atom)[is_transposed])

    def make(self, operation: str, width: int, *operands: Value | Matrix) -> Value:
        """Add an instruction, unless the same one is there already."""
        key = operation, width, operands
        if key not in self._made:
            number = self._count_up(width)
            self.instructions.append(MadeInstruction(operation, width, operands, number))
            self._made[key] = Value(number, width)
        return self._made[key]

    def join(self, parts: Sequence[tuple[Value, int]]) -> Value:
        """Put values of these widths side by side."""
        number = self._count_up(sum(width for _, width in parts))
        offset = 0
        for value, width in parts:
            if width:
                self.instructions.append(MadeInstruction("copy", width, (value,), number, offset))
            offset += width
        return Value(number, offset)

    def write(self, atom: Atom, to: Address) -> None:
        """Write an output of the step."""
        if get_shape(atom)[:1] != (self.rows,) or get_dtype(atom) not in ("float32", "bool"):
            raise NotByRowsError("an output has no rows, or another dtype")
        operation = "store truth" if get_dtype(atom) == "bool" else "copy"
        self.instructions.append(MadeInstruction(operation, measure_row(atom), (self.read(atom),), to))

    def _count_up(self, width: int) -> int:
        self.widths.append(width)
        return len(self.widths) - 1

    def _read_constant(self, atom: Var, wanted: Shape) -> Value:
        """Find where a constant is read. It is a number, one row for all, or its own rows."""
        shape = get_shape(atom)
        if shape == ():
            return self._read_array("shared", atom)
        is_row = len(shape) == len(wanted) and (shape[1:] == wanted[1:] or measure_row(atom) == 1)
        if not is_row or shape[0] not in (1, self.rows):
            raise NotByRowsError(f"{shape} is no operand for {wanted}")
        return self._read_array("fixed" if shape[0] == self.rows else "shared", atom)

    def _read_array(self, kind: str, atom: Var) -> Value:
        dtype = get_dtype(atom)
        if dtype != "float32" and (dtype != "bool" or kind == "shared"):
            raise NotByRowsError(f"{dtype} is read")
        indices = self.arrays[kind]
        value = Value(Address(kind, indices.setdefault(atom, len(indices))), measure_row(atom))
        return self.make("load truth", value.width, value) if dtype == "bool" else value
