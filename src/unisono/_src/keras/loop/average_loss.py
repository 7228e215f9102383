"""Losses of a replica that add up to the global batch's loss.

The functions have the names of `tf.nn`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from keras import ops

from unisono._src.keras.private.compiled_losses import reduce_weighted_values
from unisono._src.keras.replica.trace_recorder import ReplicaCode, get_current_code
from unisono._src.keras.steps.loss_inputs import spread_weights
from unisono._src.near_names import says_near_names
from unisono._src.typing import AnyArray, Array, KerasObject


@says_near_names
def compute_average_loss(
    per_example_loss: AnyArray, sample_weight: AnyArray | None = None, global_batch_size: int | None = None
) -> Array:
    """Compute this replica's share of the mean loss. It is the sum of its examples' losses over the size of the global batch.

    Args:
        per_example_loss: One value for each example, of a loss with reduction=None.
        sample_weight: Weights for the examples.
        global_batch_size: The number to divide by. By default the real rows of this global batch.

    Returns:
        A number; the sum of all replicas' numbers is the mean over the global batch.
    """
    code = require_replica_code("compute_average_loss")
    given: KerasObject = ops.convert_to_tensor(per_example_loss)
    values: KerasObject = code.axes.find_rows(given, need_rows=True)
    if values is None:
        what = f"an array whose shape {tuple(given.shape)} is the same for any number of rows" if given.ndim else "one number"
        raise ValueError(
            f"compute_average_loss received {what}; it needs one loss for each example. Make the loss with reduction=None, and do not add up "
            f"its values."
        )
    if not jnp.issubdtype(values.dtype, jnp.floating):
        values = ops.cast(values, "float32")
    weights = None if sample_weight is None else spread_weights(values, sample_weight)
    total: KerasObject = reduce_weighted_values(values, weights, reduction="sum", dtype=values.dtype)
    code.note("weights", sample_weight)
    if global_batch_size is None:
        code.note("vector", values)
        return code.note("share", code.note("mean", code.divided(total, float(values.shape[0]))))
    if ops.ndim(global_batch_size) or global_batch_size <= 0:
        raise ValueError(f"compute_average_loss received global_batch_size={global_batch_size!r}; it must be a positive number.")
    code.note("divided", values)
    code.fixed_divisors.append((float(global_batch_size), values.size // values.shape[0]))
    return code.note("share", code.note("mean", ops.divide_no_nan(total, ops.cast(global_batch_size, "float32"))))


@says_near_names
def scale_regularization_loss(regularization_loss: AnyArray | Sequence[AnyArray]) -> Array:
    """Compute this replica's share of losses that do not depend on rows. An example is `sum(model.losses)`.

    Args:
        regularization_loss: A number, or several numbers to be added.

    Returns:
        A number; the sum of all replicas' numbers is the loss itself.
    """
    code = require_replica_code("scale_regularization_loss")
    losses = regularization_loss if isinstance(regularization_loss, list | tuple) else [regularization_loss]
    total: KerasObject = 0.0
    for loss in losses:
        total += ops.sum(ops.cast(loss, "float32"))
    return code.note("share", code.row_fraction * total)


def require_replica_code(name: str) -> ReplicaCode:
    """The replica code that runs here. A call from elsewhere is refused, under the public name of the function."""
    code = get_current_code()
    if code is None:
        raise RuntimeError(
            f"un.{name} is for replica code, where the loss of some rows becomes their share of the global one. Call it in the function "
            f"that strategy.run gets."
        )
    return code
