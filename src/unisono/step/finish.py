"""The end of a step: the optimizer, the moving state, the metrics, once, from the total of all replicas."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras

from unisono import keras_seam
from unisono.replica import randomness
from unisono.replica.contribution import Contribution


def finish_training(model: Any, assigned: list[int], state: Any, total: Contribution, rows: Any, present: Any) -> Any:
    """(new state, logs, whether the replicas' counters disagree) from the state before and the total."""
    weights, others, slots, metrics = state
    gradients = [g.astype(w.dtype) for g, w in zip(total.gradients, weights, strict=True)]
    if weights:
        weights, slots = model.optimizer.stateless_apply(slots, gradients, weights)
    others, disagree = merged(model, assigned, others, total, present)
    metrics, logs = tracked(model, weights, metrics, total, rows)
    return (weights, others, slots, metrics), logs, disagree


def finish_evaluation(model: Any, assigned: list[int], state: Any, total: Contribution, rows: Any, present: Any) -> Any:
    weights, others, metrics = state
    others, disagree = merged(model, assigned, others, total, present)
    metrics, logs = tracked(model, weights, metrics, total, rows)
    return (weights, others, metrics), logs, disagree


def merged(model: Any, assigned: list[int], before: list[Any], total: Contribution, present: Any) -> tuple[list[Any], Any]:
    """The non-trainable state that the replicas leave, and for each counter whether they disagree on it."""
    after, disagree = list(before), []
    moving, counters, seeds = iter(total.moving), iter(total.counters), iter(total.seeds)
    for index in assigned:
        old = before[index]
        if randomness.is_seed(model.non_trainable_variables[index]):
            after[index] = old + next(seeds)
        elif jnp.issubdtype(old.dtype, jnp.floating):
            after[index] = next(moving).astype(old.dtype)
        else:
            first, every = next(counters)
            after[index] = old + first
            disagree.append(jnp.any(every != first * present.astype(first.dtype)))
    return after, disagree


def tracked(model: Any, weights: list[Any], before: list[Any], total: Contribution, rows: Any) -> tuple[list[Any], Any]:
    """The metrics' state with what the replicas added and the global loss, and the logs that it gives."""
    variables = model.metrics_variables
    values = [old + added for old, added in zip(before, total.metrics, strict=True)]
    mapping = [*zip(variables, values, strict=True), *zip(model.trainable_variables, weights, strict=True)]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        keras_seam.loss_tracker(model).update_state(total.loss, sample_weight=rows)
        for index, tracker in enumerate(keras_seam.term_trackers(model)):
            tracker.update_state(total.terms[index], sample_weight=rows)
        logs = dict(model.get_metrics_result()) | total.logs
        return [scope.get_current_value(v) for v in variables], logs
