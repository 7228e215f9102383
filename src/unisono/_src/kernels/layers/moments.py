"""Match means, variances and vectors in a jaxpr.

The jaxpr is not differentiated yet. They are recognised by what is computed.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn

from unisono._src.kernels.layers.views import read_constant
from unisono._src.programs.equations import Producers
from unisono._src.programs.operands import Atom, get_dtype, get_shape
from unisono._src.typing import Shape

ARRANGEMENTS = ("broadcast_in_dim", "reshape", "expand_dims", "squeeze", "copy", "copy_p")
"""Primitives that keep the order of an array's elements, if their number stays the same."""


class OtherProgramError(Exception):
    """Why a jaxpr does not compute what a kernel computes."""


Axes: TypeAlias = tuple[int, ...]
"""Numbers of dimensions, in order."""


class Moment(NamedTuple):
    """The array and the dimensions of a mean or a variance."""

    x: Atom
    axes: Axes


def last_axis(shape: Shape) -> Axes:
    return (len(shape) - 1,)


def first_axes(shape: Shape) -> Axes:
    """All dimensions but the last one."""
    return tuple(range(len(shape) - 1))


def read_mean(atom: Atom, made_by: Producers) -> Moment:
    """Match a mean: its array and dimensions. The reduced dimensions are kept with length 1."""
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
    """Match a variance, as `jnp.var` computes it."""
    of_squares = read_mean(atom, made_by)
    square = expect_equation(of_squares.x, "square", made_by)
    difference = expect_equation(square.invars[0], "sub", made_by)
    mean = read_mean(difference.invars[1], made_by)
    if difference.invars[0] is not mean.x or mean.axes != of_squares.axes:
        raise OtherProgramError
    return mean


def skip_check_of_count(atom: Atom, made_by: Producers) -> Atom:
    """Skip the selection with which `jnp.var` guards empty arrays. It would choose NaN where there are no elements."""
    eqn = made_by.find(atom)
    if eqn is None or eqn.primitive.name != "select_n":
        return atom
    condition, _, variance = eqn.invars
    count, least = (read_known_number(operand, made_by) for operand in expect_equation(condition, "gt", made_by).invars)
    if count is None or least is None or count <= least:
        raise OtherProgramError
    return variance


def read_known_number(atom: Atom, made_by: Producers) -> float | None:
    """Read a number in the jaxpr, also as a difference of two. `jnp.var` subtracts `ddof` from the number of elements."""
    eqn = made_by.find(atom)
    if eqn is None or eqn.primitive.name != "sub":
        return read_constant(atom, made_by)
    one, other = (read_constant(operand, made_by) for operand in eqn.invars)
    return None if one is None or other is None else one - other


def skip_reshapes(atom: Atom, made_by: Producers) -> Atom:
    """Skip reshapes back to the array with the same elements in order."""
    while (eqn := made_by.find(atom)) is not None and eqn.primitive.name in ARRANGEMENTS:
        before = eqn.invars[0]
        sizes = [[size for size in get_shape(one) if size != 1] for one in (before, atom)]
        if sizes[0] != sizes[1]:
            break
        atom = before
    return atom


def is_vector(atom: Atom, width: int) -> bool:
    """Whether an array is one float32 row, shared by all rows."""
    shape = get_shape(atom)
    return get_dtype(atom) == "float32" and shape[-1:] == (width,) and set(shape[:-1]) <= {1}


def expect_equation(atom: Atom, name: str, made_by: Producers) -> JaxprEqn:
    """The equation that made an array, which must be of this primitive."""
    eqn = made_by.find(atom)
    if eqn is None or eqn.primitive.name != name:
        raise OtherProgramError
    return eqn


def each_way(eqn: JaxprEqn) -> list[tuple[Atom, Atom]]:
    """The two operands in both orders."""
    one, other = eqn.invars
    return [(one, other), (other, one)]
