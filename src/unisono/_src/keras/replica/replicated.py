"""Arrays that every replica gets whole: `un.replicate`.

The test for an array of any library is here, too.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._src.near_names import says_near_names
from unisono._src.typing import Array, LibraryArray, PyTree, is_dict


@dataclasses.dataclass(frozen=True, eq=False)
class Replicated:
    """A tree of arrays that every replica gets whole. A tree of one array is used like the array."""

    value: PyTree

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(self.value, *args, **kwargs)

    def __getitem__(self, key: Any) -> Replicated | Array:
        """A part of the tree, or of the array."""
        return Replicated(self.value[key]) if not is_array(self.value) else self.__jax_array__()[key]

    def __iter__(self) -> Iterator[object]:
        if is_dict(self.value):
            return iter(self.value)
        return iter(self.__jax_array__()) if is_array(self.value) else map(Replicated, self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the array."""
        if name.startswith("__") or not is_array(self.value):
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)


def forward_operator(name: str) -> Callable[..., Array]:
    """Build the operator method that computes with the array."""

    def compute(self: Replicated, *others: object) -> Array:
        return getattr(self.__jax_array__(), name)(*others)

    return compute


for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    for _name in (f"__{_operator}__", f"__r{_operator}__"):
        setattr(Replicated, _name, forward_operator(_name))
for _operator in ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Replicated, f"__{_operator}__", forward_operator(f"__{_operator}__"))


# JAX takes it for a tree, so that functions with a jit of their own (jnp.where, jax.nn.relu) accept one.
jax.tree_util.register_pytree_node(  # pyright: ignore[reportUnknownMemberType]  # JAX leaves the type of a key in a path open
    Replicated, lambda replicated: ((replicated.value,), None), lambda _, values: Replicated(*values)
)


@says_near_names
def replicate(value: PyTree) -> PyTree:
    """Mark `value` as meant to reach every replica as a whole. It is an array or a tree of arrays.

    Args:
        value: For example a vector of class weights.

    Returns:
        A stand-in for the value: an argument of `strategy.run`, or, for one array, the array in code that finds it by its name.
    """
    return Replicated(value)


def refuse_tensorflow_data(thing: object, call: str) -> None:
    """Refuse data that a strategy of TensorFlow has distributed."""
    if type(thing).__module__.startswith("tensorflow.python.distribute"):
        raise TypeError(
            f"{call} received a {type(thing).__name__}, whose rows a strategy of TensorFlow has dealt out to its own replicas. Give it the "
            f"tf.data dataset itself, of global batches: model.fit(dataset), or strategy.distribute_dataset(dataset) of the strategy in whose "
            f"scope the model was made."
        )


def is_array(thing: object) -> TypeGuard[LibraryArray]:
    """Whether this is an array of any library."""
    return (
        hasattr(thing, "shape")
        and hasattr(thing, "dtype")
        and not isinstance(thing, keras.Variable | Replicated | type | types.ModuleType)
    )
