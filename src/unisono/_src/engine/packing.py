"""Trees of arrays as one vector for each dtype, and back. Contributions are added and sent in this form."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from unisono._src.typing import Array, PyTree

PackedTree = dict[str, Array]
"""A vector for each dtype, by the dtype's name."""

LENGTH_MULTIPLE = 64
"""Vectors are filled up with zeros to a multiple of this number of elements. CPUs add up rows of other lengths half as fast."""


def pack_tree(tree: PyTree) -> PackedTree:
    """Concatenate the leaves of each dtype, in the order of the tree."""
    leaves = jax.tree.leaves(tree)
    names = sorted({str(leaf.dtype) for leaf in leaves})
    vectors = {name: [jnp.ravel(leaf) for leaf in leaves if str(leaf.dtype) == name] for name in names}
    return {
        name: jnp.concatenate([*parts, jnp.zeros(-sum(part.size for part in parts) % LENGTH_MULTIPLE, name)])
        for name, parts in vectors.items()
    }


def unpack_tree(vectors: PackedTree, like: PyTree) -> PyTree:
    """Rebuild the tree that the vectors were made of. `like` has its structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(like)
    offsets = dict.fromkeys(vectors, 0)
    arrays = []
    for leaf in leaves:
        name = str(leaf.dtype)
        size = math.prod(leaf.shape)
        arrays.append(vectors[name][offsets[name] : offsets[name] + size].reshape(leaf.shape))
        offsets[name] += size
    return jax.tree.unflatten(structure, arrays)


def measure_vectors(like: PyTree) -> dict[str, int]:
    """Measure each dtype's vector, for a tree of these shapes."""
    lengths: dict[str, int] = {}
    for leaf in jax.tree.leaves(like):
        lengths[str(leaf.dtype)] = lengths.get(str(leaf.dtype), 0) + math.prod(leaf.shape)
    return {name: length + -length % LENGTH_MULTIPLE for name, length in lengths.items()}
