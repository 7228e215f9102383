"""How parts become one value: in the order of the tree, over shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from unisono._src.reduction_tree import sum_tree
from unisono._src.typing import Array

Combine: TypeAlias = Callable[[Array, Array], Array]

OPERATIONS: dict[str, Combine] = {
    "sum": jnp.add,
    "product": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
}


def make_identity(operation: str, like: Array) -> Array:
    """Return what changes no value by the operation, in the shape of an array."""
    if operation in ("sum", "or", "xor"):
        return jnp.zeros_like(like)
    if operation == "product":
        return jnp.ones_like(like)
    if jnp.issubdtype(like.dtype, jnp.floating):
        return jnp.full_like(like, np.inf if operation == "min" else -np.inf)
    if jnp.issubdtype(like.dtype, jnp.bool_):
        return jnp.full_like(like, operation in ("min", "and"))
    info = jnp.iinfo(like.dtype)
    return jnp.full_like(like, -1 if operation == "and" else info.max if operation == "min" else info.min)


def combine(operation: str, parts: Sequence[Array]) -> Array:
    """Return the parts of all shards as one value. Sums of half precision are added in float32."""
    dtype = parts[0].dtype
    is_half = operation == "sum" and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    widened = [part.astype(jnp.float32) for part in parts] if is_half else list(parts)
    total = sum_tree(range(len(parts)), lambda span: len(span) == 1, lambda span: widened[span.start], OPERATIONS[operation])
    assert total is not None  # there is a part
    return total.astype(dtype)
