"""Captured values that must not reach what is compiled.

They are arrays that are no arguments, iterators, and traced values. Arrays of a jaxpr are also compared with captured ones: one
may be the captured array, or may have been computed from it.
"""

from __future__ import annotations

import collections
import io
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import jax
import keras
import numpy as np
import numpy.typing as npt
from jax.core import Tracer
from jax.extend import core

from unisono._src.keras.checks.user_code.captures import Capture, is_user_module
from unisono._src.keras.checks.user_code.provenance import Provenance
from unisono._src.keras.replica.replicated import Replicated, is_array
from unisono._src.programs.operands import Atom, find_dependents, get_shape, list_variables
from unisono._src.typing import AnyArray, LibraryArray, Shape, UserObject

MOST_ITEMS_IN_LISTS = 1024


def find_captured_arrays(captures: list[Capture]) -> list[tuple[str, LibraryArray]]:
    """Find the arrays that a function reaches by names.

    They come with the name that the code writes. Functions that it calls count too.

    Traced numbers are among them.
    """
    return [
        (capture.path, array)
        for capture in captures
        if capture.holds_data
        for array in find_arrays(capture.value)
        if len(array.shape) or isinstance(array, Tracer)
    ]


def find_replicated_arrays(captures: list[Capture]) -> list[AnyArray]:
    """Find the captured arrays that are marked as replicated."""
    leaves = [leaf for capture in captures for leaf in find_leaves(capture.value) if isinstance(leaf, Replicated)]
    return [array for replicated in leaves for array in jax.tree.leaves(replicated)]


def find_arrays(value: UserObject) -> Iterator[LibraryArray]:
    return (leaf for leaf in find_leaves(value) if is_array(leaf) and not isinstance(leaf, Replicated))


def find_leaves(value: UserObject) -> Iterator[UserObject]:
    """Yield the leaves of a value, or the value itself. Of a long list only the first items are looked at."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple | collections.deque | set):
        yield value
        return
    for item in itertools.islice(value, MOST_ITEMS_IN_LISTS):
        yield from find_leaves(item)


def is_source_of_items(value: object) -> bool:
    """Whether a value gives items that no name leads to. It is an iterator, or an object of a user's class that has items."""
    kind = type(value)
    return isinstance(value, Iterator | keras.utils.PyDataset) or (
        hasattr(kind, "__getitem__") and is_user_module(kind.__module__)
    )


def refuse_compiled_captures(captures: list[Capture]) -> None:
    """Refuse traced values that the function has kept, and iterators.

    It is checked after a trace. Compiled code has the same item for good.
    """
    for capture in captures:
        if any(isinstance(array, Tracer) for array in find_arrays(capture.value)):
            raise ValueError(
                f"The function keeps a traced value in {capture.path!r}, where Python would find no number in it, and the compiled function would "
                f"never put another. Return the value from the function, and keep what it returned."
            )
    for capture in captures:
        if isinstance(capture.value, Iterator) and not isinstance(capture.value, io.IOBase):
            raise ValueError(
                f"The function finds the iterator {capture.path!r} by its name. Compiled, it would take from it once, when it is traced, and "
                f"have the same in every call. Take from it outside, and pass what it gives as an argument: next({capture.path})."
            )


def is_among_constants(array: npt.ArrayLike, constants: list[AnyArray]) -> bool:
    """Whether an array, or rows of it, are among these constants. They are those of a jaxpr."""
    if isinstance(array, jax.Array):
        return any(constant is array for constant in constants)
    rows = np.asarray(array)
    return any(
        has_adjacent_rows(np.asarray(constant), rows.astype(constant.dtype))
        for constant in constants
        if constant.shape[1:] == rows.shape[1:]
    )


def has_adjacent_rows(wanted: np.ndarray, rows: np.ndarray) -> bool:
    """Whether `rows` contain the wanted rows, next to each other. A few integers may be anything, and do not count."""
    count = len(wanted)
    if not 0 < count <= len(rows) or (count < len(rows) and wanted.dtype.kind != "f" and wanted.ndim == 1):
        return False
    starts = np.arange(len(rows) - count + 1)
    for number, row in enumerate(wanted):
        candidates = rows[starts + number]
        alike = (candidates == row) | ((candidates != candidates) & (row != row))  # NaN too
        starts = starts[alike.reshape(len(starts), -1).all(axis=1)]
        if not len(starts):
            return False
    return True


def can_come_from(constant: np.ndarray, array: np.ndarray) -> bool:
    """Whether a constant may have been computed from a captured array. The code reads its values.

    Signs of this are an equal number of rows, rows of its shape, a stack of such arrays, the same numbers, or sizes that the
    array has too.
    """
    if constant.shape[:1] == array.shape[:1] or constant.shape[1:] == array.shape:
        return True
    if array.ndim == 1:
        return constant.ndim == 1 and constant.dtype.kind == "f" and bool(np.isin(constant, array).all())
    sizes = {size for size in array.shape if size > 1}
    return constant.shape[1:] == array.shape[1:] or (
        constant.ndim > 1 and all(size in (1, *sizes) for size in constant.shape) and bool(sizes & set(constant.shape))
    )


def is_chosen_from(vector: np.ndarray, source: np.ndarray) -> bool:
    """Whether a vector has only values of another vector. Labels that were chosen from it do."""
    return vector.ndim == source.ndim == 1 and bool(np.isin(vector, source).all())


class ConstantOperand(NamedTuple):
    """An operand made of a constant, which meets a replica's rows.

    The rows, or what is made of them, are another operand of the equation.
    """

    constant: AnyArray
    shape: Shape
    has_its_rows: bool
    """Whether its first axis is still that of the constant, as after a slice, and not after a sum over it. An axis of a matrix that multiplies the
    replica's rows does not count."""


def find_constant_operands(
    sources: Provenance, constants: Collection[int], own_constants: Collection[int] = ()
) -> list[ConstantOperand]:
    """Find where equations combine these constants with the replica's values. The constants are given by ids.

    The replica's values are its arguments, and the constants with the ids `own_constants`.
    """
    program = sources.program.jaxpr
    values = list(zip(program.constvars, sources.program.consts, strict=True))
    made_of = {variable: {(id(value), True): value} for variable, value in values if id(value) in constants}
    own = [variable for variable, value in values if id(value) in own_constants]
    of_replica = find_dependents(program, [*(program.invars[position] for position in sources.replica_positions), *own])
    operands: list[ConstantOperand] = []
    for equation in program.eqns:
        variables = dict.fromkeys(list_variables(equation.invars))
        others = [variable for variable in variables if variable not in of_replica and variable in made_of]
        if not of_replica.isdisjoint(variables):
            operands += [
                ConstantOperand(value, get_shape(variable), has_its_rows and pairs_first_axes(equation))
                for variable in others
                for (_, has_its_rows), value in made_of[variable].items()
            ]
        elif others:
            pairs = {
                (key, has_its_rows and is_first_axis_kept(equation, variable)): value
                for variable in others
                for (key, has_its_rows), value in made_of[variable].items()
            }
            made_of |= dict.fromkeys(equation.outvars, pairs)
    return operands


def pairs_first_axes(equation: core.JaxprEqn) -> bool:
    """Whether the operands' first axes are paired. In a matmul they may not be."""
    is_product = equation.primitive.name == "dot_general"
    return not is_product or any((0, 0) in zip(*axes, strict=True) for axes in equation.params["dimension_numbers"])


def is_first_axis_kept(equation: core.JaxprEqn, operand: Atom) -> bool:
    """Whether the results' first axis is that of the operand. Unknown operations keep it."""
    name = equation.primitive.name
    params = equation.params
    if not get_shape(operand):
        return False
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][0] == 0 and params["shape"][0] == get_shape(operand)[0]
    if name == "tile":
        return get_shape(operand)[0] > 1
    if name == "transpose":
        return params["permutation"][0] == 0
    if name.startswith("reduce_") and "axes" in params:
        return 0 not in params["axes"]
    if name == "dot_general":
        (left, _), (left_batch, right_batch) = params["dimension_numbers"]
        if operand is not equation.invars[0]:
            return tuple(right_batch[:1]) == (0,)
        return tuple(left_batch[:1]) == (0,) if left_batch else 0 not in left
    return True
