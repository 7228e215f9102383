"""The end of a step: the optimizer and the metrics, once, from the total of all replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from unisono._src import keras_private
from unisono._src.replica.contribution import Contribution


def applied(optimizer: Any, slots: list[Any], gradients: list[Any], weights: list[Any]) -> tuple[list[Any], list[Any]]:
    """(weights, the optimizer's state) after one update. Gradients may be missing."""
    gradients = [None if g is None else g.astype(w.dtype) for g, w in zip(gradients, weights, strict=True)]
    return optimizer.stateless_apply(slots, gradients, weights)


def added(before: list[Any], change: list[Any], alone: bool) -> list[Any]:
    """The metrics' state with what the replicas added."""
    return [new if alone else old + new for old, new in zip(before, change, strict=True)]


def tracked(model: Any, values: list[Any], total: Contribution, rows: Any) -> list[Any]:
    """The metrics' state with the global loss, and with its terms."""
    with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, values, strict=True))) as scope:
        keras_private.loss_tracker(model).update_state(total.loss, sample_weight=rows)
        for index, tracker in enumerate(keras_private.term_trackers(model)):
            tracker.update_state(total.terms[index], sample_weight=rows)
        return [scope.get_current_value(v) for v in model.metrics_variables]


def results(model: Any, weights: list[Any], metrics: list[Any]) -> dict[str, Any]:
    """What a model's metrics say."""
    mapping = [*zip(model.metrics_variables, metrics, strict=True), *zip(model.trainable_variables, weights, strict=True)]
    with keras.StatelessScope(state_mapping=mapping):
        return jax.tree.map(jnp.asarray, dict(model.get_metrics_result()))
