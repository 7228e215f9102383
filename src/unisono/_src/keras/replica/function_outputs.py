"""The result of a user function: its arrays, and their tree."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._src.keras.replica.trace_recorder import ReplicaCode
from unisono._src.typing import Array, Outputs, PyTree, UserObject, is_traced


class OutputLeaf(NamedTuple):
    """The place of an array in a tree that the code returns."""

    place: int


def split_outputs(returned: Outputs, code: ReplicaCode) -> tuple[list[Array], PyTree]:
    """Split a tree into its arrays and their places. Each array is replaced by an `OutputLeaf`.

    A variable that is updated when all replicas have run stays in the tree, as in what `optimizer.apply_gradients` returns.
    """
    leaves, structure = jax.tree.flatten(returned)
    arrays: list[Array] = []
    tree_leaves: list[UserObject] = []
    for leaf in leaves:
        if isinstance(leaf, keras.Variable) and id(leaf) in code.scope.updated_ids:
            tree_leaves.append(leaf)
            continue
        value = getattr(leaf, "value", leaf) if type(leaf).__module__.startswith("keras.") else leaf
        if isinstance(value, (jax.Array, np.ndarray, np.generic, int, float)):
            tree_leaves.append(OutputLeaf(len(arrays)))
            arrays.append(jnp.asarray(value))
        else:
            refuse_hidden_arrays(leaf)
            tree_leaves.append(leaf)
    return arrays, jax.tree.unflatten(structure, tree_leaves)


def refuse_hidden_arrays(leaf: object) -> None:
    """Refuse arrays in an object that is no tree for JAX. They would stay behind in the trace."""
    if any(is_traced(value) for value in getattr(leaf, "__dict__", {}).values()):
        raise ValueError(
            f"The function returns a {type(leaf).__name__} with arrays in it, which strategy.run cannot look into. Return a tuple, a list, a "
            f"dict or a named tuple of arrays."
        )


def is_summed(output: Array) -> bool:
    """Whether an output is summed over replicas at once. A single number is. Most are losses, and one sum costs nothing there."""
    return output.ndim == 0 and (jnp.issubdtype(output.dtype, jnp.floating) or output.dtype == jnp.int32)


def widen_half_precision(output: Array) -> Array:
    """Convert half precision to float32, in which it is summed. All other arrays stay as they are."""
    is_half = jnp.issubdtype(output.dtype, jnp.floating) and output.dtype.itemsize < 4
    return output.astype(jnp.float32) if is_half else output
