"""Trees of arrays as one vector for each dtype, and back: what is added and sent as a whole."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

Flat = dict[str, jax.Array]
"""A vector for each dtype, by the dtype's name."""

WHOLE = 64
"""Vectors are filled up with zeros to a multiple of so many elements: CPUs add up rows of other lengths half as fast."""


def flat(tree: Any) -> Flat:
    """The leaves of each dtype, one behind the other in the order of the tree."""
    leaves = jax.tree.leaves(tree)
    names = sorted({str(leaf.dtype) for leaf in leaves})
    of = {name: [jnp.ravel(leaf) for leaf in leaves if str(leaf.dtype) == name] for name in names}
    return {name: jnp.concatenate([*parts, jnp.zeros(-sum(p.size for p in parts) % WHOLE, name)]) for name, parts in of.items()}


def unflat(vectors: Flat, like: Any) -> Any:
    """The tree that was made flat; `like` has its structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(like)
    taken, out = dict.fromkeys(vectors, 0), []
    for leaf in leaves:
        name, size = str(leaf.dtype), math.prod(leaf.shape)
        out.append(vectors[name][taken[name] : taken[name] + size].reshape(leaf.shape))
        taken[name] += size
    return jax.tree.unflatten(structure, out)


def sizes(like: Any) -> dict[str, int]:
    """The length of each vector of a tree of these shapes."""
    lengths: dict[str, int] = {}
    for leaf in jax.tree.leaves(like):
        lengths[str(leaf.dtype)] = lengths.get(str(leaf.dtype), 0) + math.prod(leaf.shape)
    return {name: length + -length % WHOLE for name, length in lengths.items()}
