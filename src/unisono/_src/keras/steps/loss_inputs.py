"""The labels and the weights that losses get."""

from __future__ import annotations

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from keras import ops

from unisono._src.keras.private.compiled_losses import (
    apply_mask,
    find_class_options,
    get_keras_mask,
    squeeze_or_expand_to_same_rank,
)
from unisono._src.typing import AnyArray, Array, PyTree


def compute_mean_divisor(values: Array, sample_weight: Array | None, mask: Array | None) -> float | Array:
    """Compute the divisor of the mean of these values.

    It is the sum of the weights that are not masked, or the number of values not masked.
    """
    return count_values(values, mask) if sample_weight is None else sum_weights(values, sample_weight, mask, values.dtype)


def spread_weights(values: Array, sample_weight: AnyArray) -> Array:
    """Broadcast weights to the shape of the values.

    Those of examples, and of their first axes, hold for all values behind them.
    """
    weights = jnp.asarray(sample_weight)
    shape = tuple(values.shape)
    given = tuple(weights.shape[:-1] if weights.ndim == values.ndim + 1 and weights.shape[-1] == 1 else weights.shape)
    if given == tuple(weights.shape) == shape:
        return weights
    if len(given) > len(shape) or any(size not in (1, length) for size, length in zip(given, shape, strict=False)):
        raise ValueError(f"sample_weight has the shape {tuple(weights.shape)}, which does not fit losses of the shape {shape}.")
    return jnp.broadcast_to(lax.expand_dims(lax.reshape(weights, given), range(len(given), len(shape))), shape)


def sum_weights(values: Array, sample_weight: Array | None, mask: Array | None, dtype: np.dtype | str) -> Array:
    """Sum the weights of values that are not masked. Without weights, each has the weight 1."""
    weight = None if sample_weight is None else ops.convert_to_tensor(sample_weight, dtype)
    weight = cast("Array", apply_mask(weight, mask, values.dtype, "sum"))  # there are weights, or a mask
    return jnp.sum(squeeze_or_expand_to_same_rank(values, weight)[1])


def count_values(values: Array, mask: Array | None) -> float | Array:
    """Count the values that are not masked."""
    return float(values.size) if mask is None else jnp.sum(as_float32(mask)) * (values.size / mask.size)


def as_float32(value: Array) -> Array:
    return ops.cast(value, "float32")


class LabelRange(NamedTuple):
    """The range of the labels in one array of a batch."""

    loss: str
    labels: int
    """The position of the array among the leaves of the batch."""
    weights: int | None
    """The position of the labels' weights. Labels whose weight is 0 may have any value."""
    classes: int
    ignored: int | None
    """A label that stands for none."""


class LabelRanges:
    """The label ranges of one model's losses, as traces show them."""

    def __init__(self) -> None:
        self.found: dict[LabelRange, None] = {}
        self._varying: set[LabelRange] = set()
        """Ranges whose number of classes depends on the rows, as where each row of a table of pairs chooses another row. It is left out of them."""

    def note(self, batch: PyTree, loss: object, y_true: PyTree, y_pred: PyTree, sample_weight: Array | None) -> None:
        """Note a call of a loss whose labels lie in the batch. Predictions with a mask may have any label where it masks."""
        options = find_class_options(loss)
        if options is None or not isinstance(y_pred, jax.Array) or get_keras_mask(y_pred) is not None:
            return
        leaves = jax.tree.leaves(batch)
        places = {id(leaf): place for place, leaf in enumerate(leaves)}
        labels, weights = places.get(id(y_true)), places.get(id(sample_weight))
        if (
            labels is None
            or (sample_weight is not None and weights is None)
            or not jnp.issubdtype(leaves[labels].dtype, jnp.integer)
        ):
            return
        classes = y_pred.shape[options.axis]
        noted = LabelRange(find_loss_name(loss), labels, weights, 0, options.ignored)
        others = [each for each in self.found if each._replace(classes=0) == noted and each.classes != classes]
        if others or noted in self._varying:
            self._varying.add(noted)
            self.found = {each: None for each in self.found if each not in others}
        else:
            self.found[noted._replace(classes=classes)] = None


def find_loss_name(loss: object) -> str:
    return getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__)
