"""The weights of losses, and the divisor of their mean."""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from keras import ops

from unisono._src.keras.private.compiled_losses import apply_mask, squeeze_or_expand_to_same_rank
from unisono._src.typing import AnyArray, Array


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
