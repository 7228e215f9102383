"""Layer normalizations by the native kernel.

Keras writes one as `x * s + (offset - mean * s)`, where `s` is the scale over the deviation of the row. It is recognised by what
it computes, in a jaxpr that is not differentiated yet: XLA makes ten loops over memory of one layer and its gradient, and the
kernel makes two.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn

from unisono._src.kernels.layers.moments import (
    OtherProgramError,
    each_way,
    expect_equation,
    is_vector,
    last_axis,
    read_mean,
    read_variance,
    skip_check_of_count,
    skip_reshapes,
)
from unisono._src.kernels.layers.views import read_constant
from unisono._src.kernels.native.library import load_kernels
from unisono._src.kernels.native.normalizations import normalize_rows
from unisono._src.programs.equations import Producers, Replacement
from unisono._src.programs.operands import Atom, get_dtype, get_shape

LEAST_WIDTH = 16
"""Elements of a row at least: a vector of AVX-512. Shorter rows are left to XLA."""


class Normalization(NamedTuple):
    """A normalization, as found in a jaxpr."""

    x: Atom
    scale: Atom | None
    offset: Atom | None
    epsilon: float


def replace_normalization(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Replace the last sum of a normalization by a kernel call."""
    if eqn.primitive.name != "add" or get_dtype(eqn.outvars[0]) != "float32" or load_kernels().level is None:
        return None
    shape = get_shape(eqn.outvars[0])
    if len(shape) < 2 or shape[-1] < LEAST_WIDTH:
        return None
    for scaled, rest in (eqn.invars, eqn.invars[::-1]):
        try:
            normalization = read_normalization(scaled, rest, made_by)
        except OtherProgramError:
            continue
        vectors = [atom for atom in (normalization.scale, normalization.offset) if atom is not None]
        run = functools.partial(
            run_normalization, normalization.epsilon, normalization.scale is not None, normalization.offset is not None
        )
        return Replacement(run, [normalization.x, *vectors])
    return None


def read_normalization(scaled: Atom, rest: Atom, made_by: Producers) -> Normalization:
    """Match a normalization, from its two summands. `scaled` is `x * s`, and `rest` is `offset - mean * s`."""
    for x, factor in each_way(expect_equation(scaled, "mul", made_by)):
        width = get_shape(x)[-1] if get_shape(x) else 0
        if get_shape(x) != get_shape(scaled):
            continue
        try:
            inverse, scale = read_scaled(factor, "mul", width, "rsqrt", made_by)
            variance, epsilon = read_sum_with_number(expect_equation(inverse, "rsqrt", made_by).invars[0], made_by)
            if read_variance(skip_check_of_count(variance, made_by), made_by) != (x, last_axis(get_shape(x))):
                continue
            shift, offset = read_scaled(rest, "add", width, "mul", made_by)
            check_shift(shift, factor, x, made_by)
        except OtherProgramError:
            continue
        return Normalization(x, scale, offset, epsilon)
    raise OtherProgramError


def read_scaled(atom: Atom, name: str, width: int, inner: str, made_by: Producers) -> tuple[Atom, Atom | None]:
    """Match an `inner` equation that `name` may combine with a vector. The vector is None where there is none."""
    eqn = made_by.find(atom)
    if eqn is not None and eqn.primitive.name == name:
        for one, vector in each_way(eqn):
            maker = made_by.find(one)
            if maker is not None and maker.primitive.name == inner and is_vector(vector, width):
                return one, skip_reshapes(vector, made_by)
    if eqn is None or eqn.primitive.name != inner:
        raise OtherProgramError
    return atom, None


def read_sum_with_number(atom: Atom, made_by: Producers) -> tuple[Atom, float]:
    """Match the sum of an operand and a number."""
    for one, other in each_way(expect_equation(atom, "add", made_by)):
        number = read_constant(other, made_by)
        if number is not None:
            return one, number
    raise OtherProgramError


def check_shift(atom: Atom, factor: Atom, x: Atom, made_by: Producers) -> None:
    """Raise `OtherProgramError` unless an array is `-mean(x) * factor`."""
    for one, other in each_way(expect_equation(atom, "mul", made_by)):
        maker = made_by.find(one)
        if other is not factor or maker is None or maker.primitive.name != "neg":
            continue
        if read_mean(maker.invars[0], made_by) == (x, last_axis(get_shape(x))):
            return
    raise OtherProgramError


def run_normalization(epsilon: float, has_scale: bool, has_offset: bool, x: Array, *vectors: Array) -> Array:
    """Compute what the last sum gives."""
    given = iter(vectors)
    width = x.shape[-1]
    scale = next(given).reshape(width) if has_scale else jnp.ones(width, jnp.float32)
    offset = next(given).reshape(width) if has_offset else jnp.zeros(width, jnp.float32)
    return normalize_rows(x, scale, offset, epsilon)
