"""The end of a step: the optimizer and the metrics, once, from the total of all replicas."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import keras

from unisono._src.keras_private.compiled_losses import get_loss_tracker, list_term_trackers
from unisono._src.keras_private.trainer_state import list_scope_values
from unisono._src.replica.contribution import Contribution
from unisono._src.typed_jax import map_tree
from unisono._src.typing import Array, Logs


def apply_gradients(
    optimizer: keras.optimizers.Optimizer, slots: list[Array], gradients: Sequence[Array | None], weights: list[Array]
) -> tuple[list[Array], list[Array]]:
    """Return (weights, the optimizer's state) after one update. Gradients may be missing."""
    cast_gradients = [
        None if gradient is None else gradient.astype(weight.dtype) for gradient, weight in zip(gradients, weights, strict=True)
    ]
    return optimizer.stateless_apply(slots, cast_gradients, weights)


def add_to_metrics(before: list[Array], change: list[Array], alone: bool) -> list[Array]:
    """Return the metrics' state with the contributions of the replicas."""
    return [new if alone else old + new for old, new in zip(before, change, strict=True)]


def track_losses(model: keras.Model, values: list[Array], total: Contribution, rows: Array) -> list[Array]:
    """Return the metrics' state with the global loss, and with its terms."""
    with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, values, strict=True))) as scope:
        get_loss_tracker(model).update_state(total.loss, sample_weight=rows)
        for index, tracker in enumerate(list_term_trackers(model)):
            tracker.update_state(total.terms[index], sample_weight=rows)
        return list_scope_values(scope, model.metrics_variables)


def compute_logs(model: keras.Model, weights: list[Array], metrics: list[Array]) -> Logs:
    """Return the logs of a model's metrics, from the values of their variables."""
    mapping = [*zip(model.metrics_variables, metrics, strict=True), *zip(model.trainable_variables, weights, strict=True)]
    with keras.StatelessScope(state_mapping=mapping):
        return map_tree(jnp.asarray, dict(model.get_metrics_result()))
