"""Means, variances and vectors in a program that is not differentiated yet, read by what the program computes."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn

from unisono._src.operands import Atom, get_dtype, get_shape
from unisono._src.typing import Shape
from unisono._src.xla.rewrite.equations import Producers
from unisono._src.xla.rewrite.views import read_constant

ARRANGEMENTS = ("broadcast_in_dim", "reshape", "expand_dims", "squeeze", "copy", "copy_p")
"""Primitives that keep the order of an array's elements, if there are as many afterwards."""


class OtherProgramError(Exception):
    """Why a program is not what a kernel computes."""


Axes: TypeAlias = tuple[int, ...]
"""Numbers of dimensions, in order."""


class Moment(NamedTuple):
    """The array of which a mean or a variance is taken, and over which of its dimensions."""

    x: Atom
    axes: Axes


def last_axis(shape: Shape) -> Axes:
    return (len(shape) - 1,)


def first_axes(shape: Shape) -> Axes:
    """Return all dimensions but the last one."""
    return tuple(range(len(shape) - 1))


def read_mean(atom: Atom, made_by: Producers) -> Moment:
    """Return of what an array holds the means; the dimensions over which they are taken are kept with length 1."""
    division = expect_equation(atom, "div", made_by)
    total = made_by.find(skip_reshapes(division.invars[0], made_by))
    if total is None or total.primitive.name != "reduce_sum":
        raise OtherProgramError
    (x,) = total.invars
    axes = tuple(sorted(total.params["axes"]))
    shape = get_shape(x)
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    if get_shape(atom) != kept or read_known_number(division.invars[1], made_by) != math.prod(shape[axis] for axis in axes):
        raise OtherProgramError
    return Moment(x, axes)


def read_variance(atom: Atom, made_by: Producers) -> Moment:
    """Return of what an array holds the variances, as `jnp.var` computes them."""
    of_squares = read_mean(atom, made_by)
    square = expect_equation(of_squares.x, "square", made_by)
    difference = expect_equation(square.invars[0], "sub", made_by)
    mean = read_mean(difference.invars[1], made_by)
    if difference.invars[0] is not mean.x or mean.axes != of_squares.axes:
        raise OtherProgramError
    return mean


def skip_check_of_count(atom: Atom, made_by: Producers) -> Atom:
    """Return the variance that `jnp.var` selects: NaN takes its place where there are no elements."""
    eqn = made_by.find(atom)
    if eqn is None or eqn.primitive.name != "select_n":
        return atom
    condition, _, variance = eqn.invars
    count, least = (read_known_number(operand, made_by) for operand in expect_equation(condition, "gt", made_by).invars)
    if count is None or least is None or count <= least:
        raise OtherProgramError
    return variance


def read_known_number(atom: Atom, made_by: Producers) -> float | None:
    """Return a number that is known from the program, also as a difference of two: `jnp.var` takes `ddof` from the number of elements."""
    eqn = made_by.find(atom)
    if eqn is None or eqn.primitive.name != "sub":
        return read_constant(atom, made_by)
    one, other = (read_constant(operand, made_by) for operand in eqn.invars)
    return None if one is None or other is None else one - other


def skip_reshapes(atom: Atom, made_by: Producers) -> Atom:
    """Return the array with the same elements in the same order from which reshapes have made this one."""
    while (eqn := made_by.find(atom)) is not None and eqn.primitive.name in ARRANGEMENTS:
        before = eqn.invars[0]
        sizes = [[size for size in get_shape(one) if size != 1] for one in (before, atom)]
        if sizes[0] != sizes[1]:
            break
        atom = before
    return atom


def is_vector(atom: Atom, width: int) -> bool:
    """Return whether an array has a number for each element of a row, and the same for all rows."""
    shape = get_shape(atom)
    return get_dtype(atom) == "float32" and shape[-1:] == (width,) and set(shape[:-1]) <= {1}


def expect_equation(atom: Atom, name: str, made_by: Producers) -> JaxprEqn:
    """Return the equation that made an array, if it is of this primitive."""
    eqn = made_by.find(atom)
    if eqn is None or eqn.primitive.name != name:
        raise OtherProgramError
    return eqn


def each_way(eqn: JaxprEqn) -> list[tuple[Atom, Atom]]:
    """Return the two operands in both orders."""
    one, other = eqn.invars
    return [(one, other), (other, one)]
