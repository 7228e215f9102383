"""Losses of replicas that add up to the loss of the whole global batch.

A loss term is numerator / divisor. The numerator is a sum over rows. The divisor is what Keras divides by on the whole global batch; it is
counted over all replicas before the backward pass. A loss that is one number for all rows, as a loss of `add_loss` or of a function that
returns one number, is weighted by how it grows with the rows (`growth`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from keras import ops

from unisono._src.keras_private.compiled_losses import (
    apply_mask,
    call_compiled_loss,
    call_compute_loss,
    count_weight_regularizers,
    is_loss_of_keras,
    list_loss_owners,
    reduce_weighted_values,
    replace_losses,
    squeeze_or_expand_to_same_rank,
)
from unisono._src.keras_private.masks import get_keras_mask
from unisono._src.keras_private.models import overrides_method
from unisono._src.replica.growth import Growth
from unisono._src.replica.protocol import Divisor
from unisono._src.replica.row_coupling import OutputRows, find_loss_name
from unisono._src.typing import AnyArray, Array, Outputs, PyTree, UserFunction

LossFunction: TypeAlias = keras.losses.Loss | UserFunction
"""A loss of compile()."""
NoteLabels: TypeAlias = Callable[[object, PyTree, PyTree, "Array | None"], None]
"""`note_labels(loss, y_true, y_pred, sample_weight)`."""


def ignore_labels(loss: object, y_true: PyTree, y_pred: PyTree, sample_weight: Array | None) -> None:
    """Do nothing: nobody looks at the labels."""


def compute_divisor(loss: keras.losses.Loss, values: Array, sample_weight: Array | None, mask: Array | None) -> Divisor:
    """Return the divisor of a loss: a Python number where shapes decide it, a traced number where masks or weights do, None for a sum."""
    if loss.reduction == "sum":
        return None
    if loss.reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
        return sum_weights(values, sample_weight, mask, loss.dtype)
    return count_values(values, mask)


def compute_mean_divisor(values: Array, sample_weight: Array | None, mask: Array | None) -> float | Array:
    """Return the divisor of the mean of these values: the sum of the weights that are not masked, or the number of values not masked."""
    return count_values(values, mask) if sample_weight is None else sum_weights(values, sample_weight, mask, values.dtype)


def spread_weights(values: Array, sample_weight: AnyArray) -> Array:
    """Return weights in the shape of the values: those of examples, and of their first axes, hold for all values behind them."""
    weights = jnp.asarray(sample_weight)
    shape = tuple(values.shape)
    given = tuple(weights.shape[:-1] if weights.ndim == values.ndim + 1 and weights.shape[-1] == 1 else weights.shape)
    if given == tuple(weights.shape) == shape:
        return weights
    if len(given) > len(shape) or any(size not in (1, length) for size, length in zip(given, shape, strict=False)):
        raise ValueError(f"sample_weight has the shape {tuple(weights.shape)}, which does not fit losses of the shape {shape}.")
    return jnp.broadcast_to(lax.expand_dims(lax.reshape(weights, given), range(len(given), len(shape))), shape)


def sum_weights(values: Array, sample_weight: Array | None, mask: Array | None, dtype: np.dtype | str) -> Array:
    """Return the sum of the weights of values that are not masked; without weights, each has the weight 1."""
    weight = None if sample_weight is None else ops.convert_to_tensor(sample_weight, dtype)
    weight = cast("Array", apply_mask(weight, mask, values.dtype, "sum"))  # there are weights, or a mask
    return jnp.sum(squeeze_or_expand_to_same_rank(values, weight)[1])


def count_values(values: Array, mask: Array | None) -> float | Array:
    """Return the number of values that are not masked."""
    return float(values.size) if mask is None else jnp.sum(as_float32(mask)) * (values.size / mask.size)


def as_float32(value: Array) -> Array:
    return ops.cast(value, "float32")


class LossTerms:
    """Functions that replace the losses of compile() while a replica is traced, and record divisors and values.

    A model may call its compiled loss several times in a step. Each call has its own divisor.
    """

    def __init__(
        self,
        losses: Sequence[LossFunction],
        row_fraction: Array,
        growth: Growth,
        by_rows: OutputRows,
        totals: Array | None = None,
        as_mean: bool = False,
        note_labels: NoteLabels = ignore_labels,
    ) -> None:
        """`totals` are the loss divisors of the global batch, in the order of the calls; None while they are counted.

        `as_mean`: the caller multiplies by the row fraction once more. `note_labels` hears of each call of a loss.
        """
        self.divisors: list[Divisor] = []
        """The divisor of each call, in order."""
        self.row_fraction = row_fraction
        self.growth = growth
        self._by_rows = by_rows
        self._totals = totals
        self._as_mean = as_mean
        self._note_labels = note_labels
        self._values: list[list[Array]] = [[] for _ in losses]
        self.loss_functions = [functools.partial(self._call, *pair) for pair in zip(losses, self._values, strict=True)]

    @property
    def values(self) -> Array:
        """Return the replica's contribution to each term, as one array. Of several calls it is the mean, as Keras' trackers show it."""
        return jnp.array([sum(seen) / max(1, len(seen)) for seen in self._values], jnp.float32)

    def _call(
        self, loss: LossFunction, seen: list[Array], y_true: PyTree, y_pred: PyTree, sample_weight: Array | None = None
    ) -> Array:
        self._note_labels(loss, y_true, y_pred, sample_weight)
        value, divisor = self._compute_numerator_and_divisor(loss, y_true, y_pred, sample_weight)
        self.divisors.append(divisor)
        if divisor is not None and self._totals is not None:
            value = ops.divide_no_nan(value, self._totals[len(self.divisors) - 1])
        seen.append(as_float32(value))
        return value / self.row_fraction if self._as_mean else value

    def _compute_numerator_and_divisor(
        self, loss: LossFunction, y_true: PyTree, y_pred: PyTree, sample_weight: Array | None
    ) -> tuple[Array, Divisor]:
        """Return (numerator, divisor) of a loss. Without a divisor the numerator is the replica's contribution to the loss."""
        by_rows = self._by_rows
        if not isinstance(loss, keras.losses.Loss) or type(loss).__call__ is not keras.losses.Loss.__call__:
            if sample_weight is None:
                by_rows.warn_if_coupled(loss, loss, y_true, y_pred)
            return self._weigh(
                loss, cast(Array, loss(y_true, y_pred, sample_weight))
            ), None  # its parts are hidden: one number for all rows
        input_mask = get_keras_mask(y_pred)
        convert = functools.partial(ops.convert_to_tensor, dtype=loss.dtype)
        tensors = [keras.tree.map_structure(convert, argument) for argument in (y_true, y_pred)]
        values = loss.call(*tensors)
        if loss.reduction in (None, "none") and values.ndim:
            raise ValueError(
                f"The loss {loss.name!r} has reduction={loss.reduction!r} and gives one value for each row, but fit needs one "
                f"number. Write reduction='sum_over_batch_size', or use the values in a loop of your own."
            )
        has_rows = by_rows(loss, loss.call, *tensors)
        mask_of_values = get_keras_mask(values)
        values = by_rows.restore(values, loss, loss.call, *tensors)
        if not has_rows or not is_loss_of_keras(loss) or isinstance(loss, keras.losses.Circle):
            by_rows.warn_if_coupled(loss, loss.call, *tensors)
        masks = [mask for mask in (input_mask, mask_of_values) if mask is not None]
        mask = functools.reduce(lambda one, other: one & other, masks) if masks else None
        if not has_rows:
            if sample_weight is None:
                value = reduce_weighted_values(values, reduction=loss.reduction, dtype=loss.dtype)
            elif by_rows.alone:
                value = reduce_weighted_values(values, sample_weight, mask, reduction=loss.reduction, dtype=loss.dtype)
            else:
                raise ValueError(
                    f"The loss {loss.name!r} returns values of shape {tuple(values.shape)} for all rows together, so sample or class "
                    f"weights cannot reach the rows. Return one value for each row, fit without weights, or write replicas=1."
                )
            return self._weigh(loss, value), None
        numerator = reduce_weighted_values(values, sample_weight, mask, reduction="sum", dtype=loss.dtype)
        return numerator, compute_divisor(loss, values, sample_weight, mask)

    def _weigh(self, loss: LossFunction, value: Array) -> Array:
        """Return the contribution to a loss from its value, which is one number for all rows of the replica."""
        what = f"the loss {find_loss_name(loss)!r} (call {len(self.divisors) + 1})"
        if self._by_rows.was_warned(loss):
            self.growth.note_warned(what)
        return self.growth.weighted(what, value, self.row_fraction)


def compute_loss_contribution(
    model: keras.Model,
    x: PyTree,
    y: PyTree,
    y_pred: Outputs,
    sample_weight: PyTree,
    training: bool,
    terms: LossTerms,
) -> Array:
    """Return the replica's contribution to the model's loss, regularizers and `add_loss` included. Needs a scope that collects losses."""
    with replace_losses(model, terms.loss_functions):
        if overrides_method(model, "compute_loss"):
            value = call_compute_loss(model, x, y, y_pred, sample_weight, training)
            return terms.growth.weighted("what compute_loss returns", as_float32(value), terms.row_fraction, of_others=True)
        value = call_compiled_loss(model, y, y_pred, sample_weight)
    value = jnp.float32(0) if value is None else value
    losses = [jnp.sum(as_float32(loss)) for loss in model.losses]
    count = len(losses) - count_weight_regularizers(model)
    for name, loss in zip(name_added_losses(model), losses[:count], strict=True):
        value += terms.growth.weighted(name, loss, terms.row_fraction)
    for loss in losses[count:]:  # of weights: the same on all replicas
        value += loss * terms.row_fraction
    return value


def name_added_losses(model: keras.Model) -> list[str]:
    """Return a name for each loss of `model.losses` that is not of weights, by the layer that has added it."""
    paths = [layer.path for layer in list_loss_owners(model)]
    numbers = [paths[: place + 1].count(path) for place, path in enumerate(paths)]
    return [
        f"loss {number} of those that the layer {path!r} adds"
        if paths.count(path) > 1
        else f"the loss that the layer {path!r} adds"
        for path, number in zip(paths, numbers, strict=True)
    ]
