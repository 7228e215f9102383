"""A digest over every bit that the contract speaks of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from unisono._src import keras_private

UNPROMISED = "unpromised-"
"""Before the fingerprint of a model whose next run may have other bits."""

MODEL_STATE = ("trainable_variables", "non_trainable_variables", "optimizer_variables")


def fingerprint(*objects: Any) -> str:
    """Return a digest of the state of models, optimizers, metrics, layers, variables, and trees of arrays, numbers and texts.

    It covers positions, shapes, dtypes and bits, never names, which Keras numbers as it goes. A model stands for its
    weights, its random and moving state, and its optimizer. Two objects with one fingerprint hold the same bits.

    Args:
        objects: What to digest, in this order.

    Returns:
        32 hexadecimal digits; with "unpromised-" before them, where a model's strategy has `deterministic=False`, or where its steps are or
        were not compiled (`run_eagerly=True`).

    Example:
        >>> fingerprint(np.zeros(3, "float32")) == fingerprint(np.zeros(3, "float32"))
        True
        >>> fingerprint(np.float32(0.0)) == fingerprint(np.float32(-0.0))
        False
    """
    contents, newest = Contents(objects), {}
    for model in contents.models:
        newest |= keras_private.newest_values(model)
    return contents.digest(lambda thing: newest[id(thing)] if id(thing) in newest else present(thing))


class Contents:
    """The variables and arrays of which a fingerprint is made, in their order."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._held = [(at, index, *of) for at, thing in enumerate(objects) for index, of in enumerate(held_by(thing))]
        whole = [leaf for thing in objects for leaf in jax.tree.leaves(thing, is_leaf=is_whole)]
        self.models = [thing for thing in whole if isinstance(thing, keras.Model)]
        bonds = [keras_private.bond_of(model) for model in self.models]
        self._promised = all(bond is None or bond.is_promised for bond in bonds)

    def digest(self, value_of: Callable[[Any], Any]) -> str:
        """Of the values that variables and arrays have."""
        digest = hashlib.sha256()
        for position, index, kind, thing in self._held:
            array = np.asarray(value_of(thing))
            digest.update(f"{position} {kind} {index} {array.shape} {array.dtype}\n".encode())
            digest.update(array.tobytes())
        return ("" if self._promised else UNPROMISED) + digest.hexdigest()[:32]


def held_by(thing: Any) -> Iterator[tuple[str, Any]]:
    """(what it is, variable or array) of everything that an object holds."""
    if isinstance(thing, keras.Model):
        variables = keras_private.variables_of(thing)
        yield from ((group, variable) for group in MODEL_STATE for variable in variables[group])
    elif isinstance(thing, keras.Variable):
        yield "variable", thing
    elif isinstance(thing, (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)):
        yield from ((type(thing).__name__, variable) for variable in thing.variables)
    else:
        for leaf in jax.tree.leaves(thing, is_leaf=is_whole):
            if is_whole(leaf):
                yield from held_by(leaf)
            elif isinstance(leaf, (np.ndarray, np.generic, jax.Array, int, float, complex, bool)):
                yield "array", leaf
            elif isinstance(leaf, str):
                yield "text", np.frombuffer(leaf.encode(), "uint8")
            else:
                raise TypeError(
                    f"fingerprint received {leaf!r} of type {type(leaf).__name__}, which holds no bits that it knows. Pass models, "
                    f"optimizers, metrics, layers, variables, arrays, numbers, texts, or lists, tuples and dicts of them."
                )


def is_whole(thing: Any) -> bool:
    return isinstance(thing, (keras.Variable, keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric))


def present(variable: Any) -> Any:
    if not isinstance(variable, keras.Variable):
        return variable
    if not keras_private.holds_value(variable):
        raise ValueError(
            f"The variable {variable.path!r} has no value here: while fit runs, Keras holds the state of model and optimizer "
            f"outside of them. Write fingerprint(model), which finds it."
        )
    return variable.value
