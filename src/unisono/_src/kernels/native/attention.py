"""Calls of the kernels for attention, in traced programs, with their gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from unisono._src.typing import PyTree, Shape

Distances: TypeAlias = tuple[int, ...]
"""The strides of an array in three dimensions of items, and one each of groups, queries and keys."""

NOWHERE: Distances = (0, 0, 0, 0, 0, 0)


class AttentionLayout(NamedTuple):
    """The layout of an attention's arrays, and its constants."""

    sizes: tuple[int, ...]
    """Three dimensions of items, groups, queries, keys, features of a query, features of a value."""
    distances: tuple[Distances, ...]
    """The strides of queries, keys, values, two masks, bias and kept weights."""
    scale: float
    fill: float
    """Replaces a score whose mask is false."""
    adds_fill: bool
    """Whether `fill` is added to such a score instead."""
    factor: float
    """Multiplies a weight."""

    @property
    def rows(self) -> int:
        return int(np.prod(self.sizes[:5]))

    @property
    def keys(self) -> int:
        return self.sizes[5]

    @property
    def attributes(self) -> dict[str, Any]:
        words = [*self.sizes, *(distance for distances in self.distances for distance in distances)]
        constants = (self.scale, self.fill, self.factor)
        return {
            "words": np.array(words, np.int64),
            "constants": np.array(constants, np.float32),
            "adds_fill": self.adds_fill,
        }


class AttentionArrays(NamedTuple):
    """The operands of an attention.

    The features of one item are contiguous. A mask, a bias or kept weights that are absent are empty arrays.
    """

    queries: Array
    keys: Array
    values: Array
    mask: Array
    other_mask: Array
    bias: Array
    kept: Array


def compute_attention(layout: AttentionLayout, arrays: AttentionArrays) -> Array:
    """Compute attention: means of the values, weighted by the scores' softmax. The result has the queries' dimensions."""
    return cast(Array, compute_means(layout, arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def compute_means(layout: AttentionLayout, arrays: AttentionArrays) -> Array:
    return call_attention(layout, arrays)[0]


def call_attention(layout: AttentionLayout, arrays: AttentionArrays) -> Sequence[Array]:
    """Compute the means, and two numbers a row for the gradient."""
    shape: Shape = (*arrays.queries.shape[:-1], layout.sizes[7])
    results = [jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((2, layout.rows), jnp.float32)]
    return jax.ffi.ffi_call("unisono_attend", results)(*arrays, **layout.attributes)


def attend_forward(layout: AttentionLayout, primals: Sequence[CustomVJPPrimal]) -> tuple[Array, tuple[Any, ...]]:
    """Compute the means, and the residuals of the gradient. Each operand comes with a flag: whether its gradient is asked for."""
    arrays = AttentionArrays(*(primal.value for primal in primals))
    out, numbers = call_attention(layout, arrays)
    is_bias_asked_for = primals[AttentionArrays._fields.index("bias")].perturbed
    needs_bias = () if is_bias_asked_for else None  # JAX passes on arrays, and trees without any, but no bool
    return out, (arrays, numbers, needs_bias)


def attend_backward(layout: AttentionLayout, residuals: tuple[Any, ...], by_out: Array | SymbolicZero) -> tuple[PyTree]:
    """Compute the gradients by the operands."""
    arrays, numbers, needs_bias = residuals
    if isinstance(by_out, SymbolicZero):
        by_out = jnp.zeros(by_out.shape, jnp.float32)
    scores = 0 if needs_bias is None else layout.rows * layout.keys
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (arrays.queries, arrays.keys, arrays.values)]
    call = jax.ffi.ffi_call("unisono_attend_gradient", [*results, jax.ShapeDtypeStruct((scores,), jnp.float32)])
    by_queries, by_keys, by_values, by_scores = call(*arrays, numbers, by_out, **layout.attributes)
    by_bias = None if needs_bias is None else sum_over_shared(by_scores, layout, arrays.bias.shape)
    return (AttentionArrays._make([by_queries, by_keys, by_values, None, None, by_bias, None]),)


compute_means.defvjp(attend_forward, attend_backward, symbolic_zeros=True)


def sum_over_shared(by_scores: Array, layout: AttentionLayout, shape: Shape) -> Array:
    """Compute the gradient by a bias of this shape. It sums over all scores that share an element of the bias."""
    shared = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return jnp.sum(by_scores.reshape(layout.sizes[:6]), shared, keepdims=True)
