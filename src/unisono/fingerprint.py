"""A digest over every bit that the contract speaks of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np

from unisono import keras_seam

UNPROMISED = "unpromised-"
"""Before the fingerprint of a model whose next run may have other bits."""

MODEL_STATE = ("trainable_variables", "non_trainable_variables", "optimizer_variables")


def fingerprint(*objects: Any) -> str:
    """A digest of the state of models, optimizers, metrics, layers, variables, and trees of arrays.

    It covers positions, shapes, dtypes and bits, never names, which Keras numbers as it goes. A model stands for its
    weights, its random and moving state, and its optimizer. Two objects with one fingerprint hold the same bits.

    Args:
        objects: What to digest, in this order.

    Returns:
        32 hexadecimal digits; with "unpromised-" before them, where a model's strategy has `deterministic=False`.

    Example:
        >>> fingerprint(np.zeros(3, "float32")) == fingerprint(np.zeros(3, "float32"))
        True
        >>> fingerprint(np.float32(0.0)) == fingerprint(np.float32(-0.0))
        False
    """
    digest = hashlib.sha256()
    for position, thing in enumerate(objects):
        for index, (kind, value) in enumerate(arrays_of(thing)):
            array = np.asarray(value)
            digest.update(f"{position} {kind} {index} {array.shape} {array.dtype}\n".encode())
            digest.update(array.tobytes())
    bonds = [keras_seam.bond_of(thing) for thing in objects]
    promised = all(bond is None or bond.strategy.deterministic for bond in bonds)
    return ("" if promised else UNPROMISED) + digest.hexdigest()[:32]


def arrays_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """(what it is, its bits) of everything that an object holds."""
    if isinstance(thing, keras.Model):
        for group, values in keras_seam.current_values(thing, MODEL_STATE).items():
            yield from ((group, value) for value in values)
    elif isinstance(thing, keras.Variable):
        yield "variable", present(thing)
    elif isinstance(thing, (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)):
        yield from ((type(thing).__name__, present(variable)) for variable in thing.variables)
    else:
        for leaf in jax.tree.leaves(thing, is_leaf=is_whole):
            if is_whole(leaf):
                yield from arrays_of(leaf)
            elif isinstance(leaf, (np.ndarray, np.generic, jax.Array, int, float, complex, bool)):
                yield "array", leaf
            else:
                raise TypeError(
                    f"fingerprint received {leaf!r} of type {type(leaf).__name__}, which holds no bits that it knows. Pass models, "
                    f"optimizers, metrics, layers, variables, arrays, or lists, tuples and dicts of them."
                )


def is_whole(thing: Any) -> bool:
    return isinstance(thing, (keras.Variable, keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric))


def present(variable: Any) -> Any:
    if not keras_seam.holds_value(variable):
        raise ValueError(
            f"The variable {variable.path!r} has no value here: while fit runs, Keras holds the state of model and optimizer "
            f"outside of them. Write fingerprint(model), which finds it."
        )
    return variable.value
