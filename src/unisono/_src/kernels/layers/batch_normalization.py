"""Batch normalizations by native kernels: moments, and the gradient's sums.

Keras writes them as `x * s + (offset - mean * s)`, where `s` is the scale over the deviation of the column. The means, the
variances and the sum are recognised one by one. A layer and its gradient are five sums over all rows. The kernels read the input
once for both moments, and once more, with the gradient by the result, for the other sums. A ReLU behind the layer is computed
again there, so that its mask need not be stored.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from unisono._src.kernels.layers.moments import (
    OtherProgramError,
    each_way,
    expect_equation,
    first_axes,
    is_vector,
    read_mean,
    read_variance,
)
from unisono._src.kernels.native.column_sums import find_means, find_variances, scale_and_clip_columns, scale_columns
from unisono._src.kernels.native.library import load_kernels
from unisono._src.programs.equations import Producers, Replacement
from unisono._src.programs.operands import Atom, get_dtype, get_shape
from unisono._src.programs.private.jaxprs import close_program
from unisono._src.typing import Shape

REPLACED = ("div", "add", "custom_jvp_call")
"""Primitives that a rewrite looks at: the last ones of a moment, of a scaling of columns, and of a ReLU."""

LEAST_COLUMNS = 16
"""A vector of AVX-512. Fewer columns are left to XLA."""

LEAST_ELEMENTS = 1 << 11
"""With fewer, a call takes longer than XLA's loops."""

_local_scope: contextvars.ContextVar[str | None] = contextvars.ContextVar("local_scope", default=None)


@contextlib.contextmanager
def replace_for_shards(local_scope: str) -> Iterator[None]:
    """Replace arrays of any size in the block. A batch and its shards are traced one by one, and must be replaced alike.

    Moments are replaced in `local_scope` alone, whose rows are those of one shard. Elsewhere they are sums that shards add up.
    """
    token = _local_scope.set(local_scope)
    try:
        yield
    finally:
        _local_scope.reset(token)


Bounds: TypeAlias = tuple[float, float | None]
"""The least value of a function that clips, and the largest, if there is one."""

CLIPS: Mapping[Callable[[Array], Array], Bounds] = {jax.nn.relu: (0.0, None), jax.nn.relu6: (0.0, 6.0)}


def replace_batch_normalization(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Replace a moment or a scaling by calls whose gradients have kernels."""
    name = eqn.primitive.name
    if name not in REPLACED or get_dtype(eqn.outvars[0]) != "float32" or load_kernels().level is None:
        return None
    try:
        if name == "div":
            return replace_moment(eqn, made_by)
        if name == "add":
            return Replacement(scale_by_vectors, find_scaling(eqn, made_by))
        if len(eqn.invars) == len(eqn.outvars) == 1:
            total = expect_equation(eqn.invars[0], "add", made_by)
            scaling = find_scaling(total, made_by)
            bounds = read_bounds(eqn)
            run = None if bounds is None else functools.partial(scale_and_clip_by_vectors, *bounds)
            return None if run is None else Replacement(run, scaling, total)
    except OtherProgramError:
        pass
    return None


def replace_moment(eqn: JaxprEqn, made_by: Producers) -> Replacement:
    """Replace means or variances over all rows."""
    (result,) = eqn.outvars
    try:
        moment = read_variance(result, made_by)
        compute = find_variances
    except OtherProgramError:
        moment = read_mean(result, made_by)
        compute = find_means
        check_variance_is_read(moment.x, made_by)
    local_scope = _local_scope.get()
    is_of_shards = local_scope is not None and local_scope not in str(eqn.source_info.name_stack)
    if is_of_shards or moment.axes != first_axes(get_shape(moment.x)):
        raise OtherProgramError
    check_columns(moment.x, made_by)
    return Replacement(functools.partial(compute_moments, compute, get_shape(result)), [moment.x])


def check_variance_is_read(x: Atom, made_by: Producers) -> None:
    """Raise `OtherProgramError` if no variance is computed from `x`. XLA's loop is good enough for a mean alone."""
    for eqn in made_by.values():
        difference = made_by.find(eqn.invars[0]) if eqn.primitive.name == "square" else None
        if difference is not None and difference.primitive.name == "sub" and difference.invars[0] is x:
            return
    raise OtherProgramError


def compute_moments(compute: Callable[[Array], Array], shape: Shape, x: Array) -> Array:
    return compute(x).reshape(shape)


def find_scaling(eqn: JaxprEqn, made_by: Producers) -> list[Atom]:
    """Find the array, scales and offsets of a scaling of columns. The equation adds the offsets."""
    for scaled, offset in each_way(eqn):
        product = made_by.find(scaled)
        if product is None or product.primitive.name != "mul":
            continue
        for x, scale in each_way(product):
            shape = get_shape(x)
            if shape and shape == get_shape(eqn.outvars[0]) and all(is_vector(vector, shape[-1]) for vector in (scale, offset)):
                check_columns(x, made_by)
                return [x, scale, offset]
    raise OtherProgramError


def scale_by_vectors(x: Array, scale: Array, offset: Array) -> Array:
    return scale_columns(x, scale.reshape(-1), offset.reshape(-1))


def scale_and_clip_by_vectors(low: float, high: float | None, x: Array, scale: Array, offset: Array) -> Array:
    return scale_and_clip_columns(low, high, x, scale.reshape(-1), offset.reshape(-1))


def read_bounds(eqn: JaxprEqn) -> Bounds | None:
    """Read the bounds of a call of `jax.nn.relu` or `jax.nn.relu6`. None for another function.

    A function of a user may have the same name and another gradient. So the derivatives are compared, as jaxprs.
    """
    (operand,) = eqn.invars
    call = jaxpr_as_fun(close_program(eqn.params["call_jaxpr"].jaxpr.replace(eqns=[eqn], invars=[operand], outvars=eqn.outvars)))
    shape = get_shape(operand)
    derivative = print_derivative(lambda x: call(x)[0], shape)
    return next((bounds for function, bounds in CLIPS.items() if print_derivative(function, shape) == derivative), None)


def print_derivative(function: Callable[[Array], Array], shape: Shape) -> str:
    """Print the jaxpr of a function and its derivative."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    return str(jax.make_jaxpr(lambda x, direction: jax.jvp(function, (x,), (direction,)))(x, x))


def check_columns(x: Atom, made_by: Producers) -> None:
    """Raise `OtherProgramError` if XLA's loops are as fast for an array.

    They convert elements of other dtypes on the way, where a kernel would have them written to memory first.
    """
    shape = get_shape(x)
    maker = made_by.find(x)
    is_converted = maker is not None and maker.primitive.name == "convert_element_type"
    is_small = math.prod(shape) < LEAST_ELEMENTS and _local_scope.get() is None
    if len(shape) < 2 or shape[-1] < LEAST_COLUMNS or is_small or get_dtype(x) != "float32" or is_converted:
        raise OtherProgramError
