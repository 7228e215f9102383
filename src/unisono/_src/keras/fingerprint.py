"""A digest of all bits that every placement must have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import jax
import keras
import numpy as np

from unisono._src.hidden_frames import PUBLIC_CALL
from unisono._src.keras.library_arrays import has_values, read_values
from unisono._src.keras.ownership import find_bond
from unisono._src.keras.private.trainer_state import group_variables, has_value, map_newest_values
from unisono._src.typing import AnyArray

Content: TypeAlias = keras.Variable | AnyArray | np.generic | complex
"""A part of an object: a variable, an array or a number."""

UNPROMISED = "unpromised-"
"""The prefix of a model's fingerprint, if its next run may have other bits."""

MODEL_STATE = ("trainable_variables", "non_trainable_variables", "optimizer_variables")


def fingerprint(*objects: object) -> str:
    """Compute a digest of the state of objects.

    They are models, optimizers, metrics, layers, variables, and trees of arrays, numbers and texts.

    It covers positions, shapes, dtypes and bits, never names, which Keras numbers as it goes. A model stands for its
    weights, its random and moving state, and its optimizer. Two objects with one fingerprint hold the same bits.

    Args:
        objects: What to digest, in this order.

    Returns:
        32 hexadecimal digits; with "unpromised-" before them, if a model's strategy has `deterministic=False`, or if its steps are or
        were not compiled (`run_eagerly=True`).

    Example:
        >>> fingerprint(np.zeros(3, "float32")) == fingerprint(np.zeros(3, "float32"))
        True
        >>> fingerprint(np.float32(0.0)) == fingerprint(np.float32(-0.0))
        False
    """
    with PUBLIC_CALL:
        contents = FingerprintContents(objects)
        newest: dict[int, AnyArray] = {}
        for model in contents.models:
            newest |= map_newest_values(model)
        return contents.digest(lambda content: newest[id(content)] if id(content) in newest else read_value(content))


class FingerprintContents:
    """The variables and arrays of a fingerprint, in order."""

    def __init__(self, objects: Sequence[object]) -> None:
        self._contents = [
            (position, index, kind, content)
            for position, holder in enumerate(objects)
            for index, (kind, content) in enumerate(list_contents(holder))
        ]
        leaves = [leaf for holder in objects for leaf in jax.tree.leaves(holder, is_leaf=is_keras_object)]
        self.models = [leaf for leaf in leaves if isinstance(leaf, keras.Model)]
        bonds = [find_bond(model) for model in self.models]
        self._promised = all(bond is None or bond.has_promised_bits for bond in bonds)

    def digest(self, value_of: Callable[[Content], AnyArray | np.generic | complex]) -> str:
        """Digest the contents. `value_of` gives the value of a variable, or of an array."""
        digest = hashlib.sha256()
        for position, index, kind, content in self._contents:
            array = np.asarray(value_of(content))
            digest.update(f"{position} {kind} {index} {array.shape} {array.dtype}\n".encode())
            digest.update(array.tobytes())
        return ("" if self._promised else UNPROMISED) + digest.hexdigest()[:32]


def list_contents(holder: object) -> Iterator[tuple[str, Content]]:
    """Yield (kind, variable or array) for all state of an object."""
    if isinstance(holder, keras.Model):
        variables = group_variables(holder)
        yield from ((group, variable) for group in MODEL_STATE for variable in variables[group])
    elif isinstance(holder, keras.Variable):
        yield "variable", holder
    elif isinstance(holder, (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)):
        yield from ((type(holder).__name__, variable) for variable in holder.variables)
    else:
        for leaf in jax.tree.leaves(holder, is_leaf=is_keras_object):
            if is_keras_object(leaf):
                yield from list_contents(leaf)
            elif isinstance(leaf, (np.ndarray, np.generic, jax.Array, int, float, complex, bool)):
                yield "array", leaf
            elif has_values(leaf):
                yield "array", read_values(leaf)
            elif isinstance(leaf, str):
                yield "text", np.frombuffer(leaf.encode(), "uint8")
            else:
                raise TypeError(
                    f"fingerprint received {leaf!r} of type {type(leaf).__name__}, which holds no bits that it knows. Pass models, "
                    f"optimizers, metrics, layers, variables, arrays, numbers, texts, or lists, tuples and dicts of them."
                )


def is_keras_object(leaf: object) -> bool:
    """Whether a leaf is a Keras object, and not a tree."""
    return isinstance(leaf, (keras.Variable, keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric))


def read_value(content: Content) -> AnyArray | np.generic | complex:
    """Read the value of a variable; an array is its own value. A variable whose value Keras holds outside of it is refused."""
    if not isinstance(content, keras.Variable):
        return content
    if not has_value(content):
        raise ValueError(
            f"The variable {content.path!r} has no value here: while fit runs, Keras holds the state of model and optimizer "
            f"outside of them. Write fingerprint(model), which finds it."
        )
    return content.value
