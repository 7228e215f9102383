"""Losses of a replica whose sum over replicas is the loss of the global batch, under the names of `tf.nn`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from keras import ops

from unisono._src import keras_private
from unisono._src.near_names import says_near_names
from unisono._src.replica.trace_recorder import ReplicaCode, current


@says_near_names
def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None) -> Any:
    """The sum of the examples' losses over the size of the global batch: this replica's share of the mean.

    Args:
        per_example_loss: One value for each example, of a loss with reduction=None.
        sample_weight: Weights for the examples.
        global_batch_size: What to divide by. By default the real rows of this global batch.

    Returns:
        A number; the sum of all replicas' is the mean over the global batch.
    """
    code = needed("compute_average_loss")
    values: Any = ops.convert_to_tensor(per_example_loss)
    if not values.ndim:
        raise ValueError(
            "compute_average_loss received one number; it needs one loss for each example. Make the loss with reduction=None."
        )
    if not jnp.issubdtype(values.dtype, jnp.floating):
        values = ops.cast(values, "float32")
    if sample_weight is not None:
        check_weights(values, sample_weight)
    total = keras_private.reduce_weighted_values(values, sample_weight, reduction="sum", dtype=values.dtype)
    if global_batch_size is None:
        code.note("vector", values)
        return code.note("share", code.divided(total, float(values.shape[0])))
    if ops.ndim(global_batch_size) or global_batch_size <= 0:
        raise ValueError(f"compute_average_loss received global_batch_size={global_batch_size!r}; it must be a positive number.")
    return code.note("share", ops.divide_no_nan(total, code.fixed(float(global_batch_size), values.size // values.shape[0])))


@says_near_names
def scale_regularization_loss(regularization_loss: Any) -> Any:
    """This replica's share of losses that do not depend on the rows, for example `sum(model.losses)`.

    Args:
        regularization_loss: A number, or several to be added.

    Returns:
        A number; the sum of all replicas' is the loss itself.
    """
    code = needed("scale_regularization_loss")
    losses = regularization_loss if isinstance(regularization_loss, list | tuple) else [regularization_loss]
    total: Any = 0.0
    for loss in losses:
        total += ops.sum(ops.cast(loss, "float32"))
    return code.note("share", code.share_of_rows * total)


def check_weights(values: Any, sample_weight: Any) -> None:
    shape = jnp.shape(sample_weight)
    rank = values.ndim
    if len(shape) not in (rank - 1, rank, rank + 1) and shape:
        raise ValueError(f"sample_weight has the shape {shape}, which does not fit losses of the shape {tuple(values.shape)}.")
    if shape and shape[0] not in (1, values.shape[0]):
        raise ValueError(f"sample_weight has the shape {shape}, which does not fit losses of the shape {tuple(values.shape)}.")


def needed(name: str) -> ReplicaCode:
    code = current()
    if code is None:
        raise RuntimeError(
            f"un.{name} is for replica code, where the loss of some rows becomes their share of the global one. Call it in the function "
            f"that strategy.run gets."
        )
    return code
