"""Losses whose shares, added over replicas, are the loss of the whole global batch.

A loss term is numerator / divisor. The numerator is a sum over rows; the divisor is what Keras divides by on the whole
global batch, counted over all replicas before the backward pass. What is
one number for all rows, as `add_loss` or a loss that returns one, is weighted by how it grows with them (`growth`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import keras
from keras import ops

from unisono._src import keras_private
from unisono._src.replica.growth import Growth
from unisono._src.replica.output_rows import ByRows


def numerator_and_divisor(
    loss: Any, y_true: Any, y_pred: Any, sample_weight: Any, weighted: Callable[[Any], Any], by_rows: ByRows
) -> tuple[Any, Any]:
    """Return (numerator, divisor) of a Keras loss on a replica's rows.

    The divisor is None where none is due: the numerator is then the replica's part of the loss as it stands. `weighted` makes it of one number
    for all rows.
    """
    if not isinstance(loss, keras.losses.Loss) or type(loss).__call__ is not keras.losses.Loss.__call__:
        if sample_weight is None:
            by_rows.warn_if_coupled(loss, loss, y_true, y_pred)
        return weighted(loss(y_true, y_pred, sample_weight)), None  # nothing to look into: one number for its rows
    if loss.reduction in (None, "none"):
        raise ValueError(
            f"The loss {loss.name!r} has reduction={loss.reduction!r} and gives one value for each row, but fit needs one "
            f"number. Write reduction='sum_over_batch_size', or use the values in a loop of your own."
        )
    in_mask = keras_private.get_keras_mask(y_pred)
    of = [keras.tree.map_structure(lambda a: ops.convert_to_tensor(a, loss.dtype), a) for a in (y_true, y_pred)]
    values, has_rows = loss.call(*of), by_rows(loss, loss.call, *of)
    if not has_rows or not keras_private.is_loss_of_keras(loss) or isinstance(loss, keras.losses.Circle):
        by_rows.warn_if_coupled(loss, loss.call, *of)
    if not has_rows:
        if sample_weight is not None:
            raise ValueError(
                f"The loss {loss.name!r} returns values of shape {tuple(values.shape)} for all rows together, so sample or class "
                f"weights cannot reach the rows. Return one value for each row, or fit without weights."
            )
        return weighted(keras_private.reduce_weighted_values(values, reduction=loss.reduction, dtype=loss.dtype)), None
    masks = [mask for mask in (in_mask, keras_private.get_keras_mask(values)) if mask is not None]
    mask = masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
    numerator = keras_private.reduce_weighted_values(values, sample_weight, mask, reduction="sum", dtype=loss.dtype)
    return numerator, divisor(loss, values, sample_weight, mask)


def divisor(loss: Any, values: Any, sample_weight: Any, mask: Any) -> Any:
    """A Python number where shapes alone decide it, a traced one where masks or weights do, None for a sum."""
    if loss.reduction == "sum":
        return None
    if loss.reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
        weight = None if sample_weight is None else ops.convert_to_tensor(sample_weight, loss.dtype)
        weight = keras_private.apply_mask(weight, mask, values.dtype, "sum")
        return ops.sum(keras_private.squeeze_or_expand_to_same_rank(values, weight)[1])
    if mask is None or loss.reduction == "mean_with_sample_weight":
        return float(values.size)
    return ops.sum(ops.cast(mask, "float32")) * (values.size / mask.size)


def count_of(values: Any, sample_weight: Any, mask: Any) -> Any:
    """What the mean of these values is divided by: their weights, as far as a mask leaves them, those that it leaves, or all."""
    if sample_weight is not None:
        weight = keras_private.apply_mask(ops.convert_to_tensor(sample_weight, values.dtype), mask, values.dtype, "sum")
        return ops.sum(keras_private.squeeze_or_expand_to_same_rank(values, weight)[1])
    return float(values.size) if mask is None else ops.sum(ops.cast(mask, "float32")) * (values.size / mask.size)


class Terms:
    """Stand in for the losses of compile() while a replica is traced, and keep what they saw.

    A model may call its compiled loss several times in a step. Each call has a divisor of its own.
    """

    def __init__(
        self, losses: Sequence[Any], share: Any, growth: Growth, by_rows: ByRows, totals: Any = None, as_mean: bool = False
    ) -> None:
        """`totals` are the divisors of the global batch, in the order of the calls; None while they are counted.

        `as_mean`: whether the caller multiplies by the share once more.
        """
        self.divisors: list[Any] = []
        """Of each call, in order."""
        self._share = share
        self._growth = growth
        self._by_rows = by_rows
        self._totals = totals
        self._as_mean = as_mean
        self._values: list[list[Any]] = [[] for _ in losses]
        self.stand_ins = [functools.partial(self._called, *pair) for pair in zip(losses, self._values, strict=True)]

    @property
    def values(self) -> Any:
        """The replica's part of each term, as an array; of several calls the mean, as Keras' trackers show it."""
        return jnp.array([sum(seen) / max(1, len(seen)) for seen in self._values], jnp.float32)

    def _called(self, loss: Any, seen: list[Any], y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        def weighted(value: Any) -> Any:
            what = f"the loss {name_of(loss)!r} (call {len(self.divisors) + 1})"
            if self._by_rows.is_coupled(loss):
                self._growth.is_said(what)
            return self._growth.weighted(what, value, self._share)

        value, divisor = numerator_and_divisor(loss, y_true, y_pred, sample_weight, weighted, self._by_rows)
        self.divisors.append(divisor)
        if divisor is not None and self._totals is not None:
            value = ops.divide_no_nan(value, self._totals[len(self.divisors) - 1])
        seen.append(ops.cast(value, "float32"))
        return value / self._share if self._as_mean else value


def share_of_loss(
    model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool, terms: Terms, share: Any, growth: Growth
) -> Any:
    """The replica's part of the model's loss, regularizers and `add_loss` included, inside a scope that collects them."""
    with keras_private.other_losses(model, terms.stand_ins):
        if keras_private.overrides(model, "compute_loss"):
            value = keras_private.computed_loss(model, x, y, y_pred, sample_weight, training)
            return growth.weighted("what compute_loss returns", ops.cast(value, "float32"), share, of_others=True)
        value = keras_private.compiled_loss(model, y, y_pred, sample_weight)
    value = jnp.float32(0) if value is None else value
    losses = [ops.sum(ops.cast(loss, "float32")) for loss in model.losses]
    of_rows = len(losses) - keras_private.weight_regularizers(model)
    for index, loss in enumerate(losses[:of_rows]):
        value += growth.weighted(f"loss {index + 1} of those that layers add", loss, share)
    for loss in losses[of_rows:]:  # the same on all replicas
        value += loss * share
    return value


def name_of(loss: Any) -> str:
    """Return the name of a loss, or of the function that it is."""
    return getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__)
