"""Normalizations of rows by the native kernel: `x * s + (offset - mean * s)`, where `s` is the scale over the deviation of the row.

That is how Keras writes a layer normalization. It is recognised by what it computes, in a program that is not differentiated yet: XLA makes
ten loops over memory of one layer and its gradient, and the kernel makes two.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn

from unisono._src.native.library import load_kernels
from unisono._src.native.normalizations import normalize_rows
from unisono._src.operands import Atom, get_dtype, get_shape
from unisono._src.xla.rewrite.equations import Producers, Replacement
from unisono._src.xla.rewrite.views import read_constant

LEAST_WIDTH = 16
"""Elements of a row at least: a vector of AVX-512. Shorter rows are left to XLA."""

ARRANGEMENTS = ("broadcast_in_dim", "reshape", "expand_dims", "squeeze", "copy", "copy_p")
"""Primitives that keep the order of an array's elements, if there are as many afterwards."""


class NoNormalizationError(Exception):
    """Why a program is no normalization that the kernel computes."""


class Normalization(NamedTuple):
    """A normalization, read from a program."""

    x: Atom
    scale: Atom | None
    offset: Atom | None
    epsilon: float


def replace_normalization(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Replace the last sum of a normalization by a call of the kernel."""
    if eqn.primitive.name != "add" or get_dtype(eqn.outvars[0]) != "float32" or load_kernels().level is None:
        return None
    shape = get_shape(eqn.outvars[0])
    if len(shape) < 2 or shape[-1] < LEAST_WIDTH:
        return None
    for scaled, rest in (eqn.invars, eqn.invars[::-1]):
        try:
            normalization = read_normalization(scaled, rest, made_by)
        except NoNormalizationError:
            continue
        vectors = [atom for atom in (normalization.scale, normalization.offset) if atom is not None]
        run = functools.partial(
            run_normalization, normalization.epsilon, normalization.scale is not None, normalization.offset is not None
        )
        return Replacement(run, [normalization.x, *vectors])
    return None


def read_normalization(scaled: Atom, rest: Atom, made_by: Producers) -> Normalization:
    """Return the normalization of which `scaled` is `x * s` and `rest` is `offset - mean * s`."""
    for x, factor in each_way(expect_equation(scaled, "mul", made_by)):
        width = get_shape(x)[-1] if get_shape(x) else 0
        if get_shape(x) != get_shape(scaled):
            continue
        try:
            inverse, scale = read_scaled(factor, "mul", width, "rsqrt", made_by)
            variance, epsilon = read_sum_with_number(expect_equation(inverse, "rsqrt", made_by).invars[0], made_by)
            check_variance(variance, x, made_by)
            shift, offset = read_scaled(rest, "add", width, "mul", made_by)
            check_shift(shift, factor, x, made_by)
        except NoNormalizationError:
            continue
        return Normalization(x, scale, offset, epsilon)
    raise NoNormalizationError


def read_scaled(atom: Atom, name: str, width: int, inner: str, made_by: Producers) -> tuple[Atom, Atom | None]:
    """Return the operand that the primitive `inner` makes, and the vector with which the primitive `name` combines this operand, if any."""
    eqn = made_by.find(atom)
    if eqn is not None and eqn.primitive.name == name:
        for one, vector in each_way(eqn):
            maker = made_by.find(one)
            if maker is not None and maker.primitive.name == inner and is_vector(vector, width):
                return one, skip_reshapes(vector, made_by)
    if eqn is None or eqn.primitive.name != inner:
        raise NoNormalizationError
    return atom, None


def read_sum_with_number(atom: Atom, made_by: Producers) -> tuple[Atom, float]:
    """Return an operand of a sum, and the number that is added to it."""
    for one, other in each_way(expect_equation(atom, "add", made_by)):
        number = read_constant(other, made_by)
        if number is not None:
            return one, number
    raise NoNormalizationError


def check_variance(atom: Atom, x: Atom, made_by: Producers) -> None:
    """Raise `NoNormalizationError` unless an array holds the variances of the rows, as `jnp.var` computes them."""
    eqn = made_by.find(atom)
    if eqn is not None and eqn.primitive.name == "select_n":  # NaN takes the place of the variance where rows have no elements
        condition, _, variance = eqn.invars
        count, least = (read_known_number(operand, made_by) for operand in expect_equation(condition, "gt", made_by).invars)
        if count is None or least is None or count <= least:
            raise NoNormalizationError
        atom = variance
    square = expect_equation(read_mean(atom, made_by), "square", made_by)
    difference = expect_equation(square.invars[0], "sub", made_by)
    if difference.invars[0] is not x or read_mean(difference.invars[1], made_by) is not x:
        raise NoNormalizationError


def check_shift(atom: Atom, factor: Atom, x: Atom, made_by: Producers) -> None:
    """Raise `NoNormalizationError` unless an array is the mean of `x`, times -1, times `factor`."""
    for one, other in each_way(expect_equation(atom, "mul", made_by)):
        maker = made_by.find(one)
        if other is factor and maker is not None and maker.primitive.name == "neg" and read_mean(maker.invars[0], made_by) is x:
            return
    raise NoNormalizationError


def read_mean(atom: Atom, made_by: Producers) -> Atom:
    """Return the array of which another one holds the means over the last axis, which is kept with length 1."""
    division = expect_equation(atom, "div", made_by)
    total = made_by.find(skip_reshapes(division.invars[0], made_by))
    if total is None or total.primitive.name != "reduce_sum":
        raise NoNormalizationError
    (x,) = total.invars
    shape = get_shape(x)
    if (
        tuple(total.params["axes"]) != (len(shape) - 1,)
        or get_shape(atom) != (*shape[:-1], 1)
        or read_known_number(division.invars[1], made_by) != shape[-1]
    ):
        raise NoNormalizationError
    return x


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
        raise NoNormalizationError
    return eqn


def each_way(eqn: JaxprEqn) -> list[tuple[Atom, Atom]]:
    """Return the two operands in both orders."""
    one, other = eqn.invars
    return [(one, other), (other, one)]


def run_normalization(epsilon: float, has_scale: bool, has_offset: bool, x: Array, *vectors: Array) -> Array:
    """Return what the last sum returns."""
    given = iter(vectors)
    width = x.shape[-1]
    scale = next(given).reshape(width) if has_scale else jnp.ones(width, jnp.float32)
    offset = next(given).reshape(width) if has_offset else jnp.zeros(width, jnp.float32)
    return normalize_rows(x, scale, offset, epsilon)
