"""The end of a step: the optimizer, the moving state, the metrics, once, from the total of all replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from unisono import keras_seam
from unisono.replica import own_step, randomness
from unisono.replica.contribution import Assigned, Contribution
from unisono.replica.program import ReplicaFunctions


def finished(
    functions: ReplicaFunctions, mode: str, state: Any, total: Contribution, rows: Any, present: Any
) -> tuple[Any, list[Any]]:
    """(new state, for each counter whether the replicas disagree on it) from the state before and the total."""
    weights, others, *slots, metrics = state
    if mode == "train" and weights:
        gradients = [g.astype(w.dtype) for g, w in zip(total.gradients, weights, strict=True)]
        weights, slots[0] = functions.model.optimizer.stateless_apply(slots[0], gradients, weights)
    others, disagree = merged(functions, mode, others, total.assigned, rows, present)
    return (weights, others, *slots, tracked(functions, mode, metrics, total, rows)), disagree


def merged(
    functions: ReplicaFunctions, mode: str, before: list[Any], total: Assigned, rows: Any, present: Any
) -> tuple[list[Any], list[Any]]:
    """The non-trainable state that the replicas leave, and for each counter whether they disagree on it."""
    after, disagree = list(before), []
    moving, counters, seeds = iter(total.moving), iter(total.counters), iter(total.seeds)
    for index in functions.findings[mode].assigned:
        old = before[index]
        if randomness.is_seed(functions.model.non_trainable_variables[index]):
            after[index] = old + next(seeds)
        elif jnp.issubdtype(old.dtype, jnp.floating):
            change = next(moving)
            after[index] = change if functions.alone else (old.astype(jnp.float32) + change / rows).astype(old.dtype)
        else:
            first, every = next(counters)
            after[index] = old + first
            disagree.append(jnp.any(every != first * present.astype(first.dtype)))
    return after, disagree


def check_counters(functions: ReplicaFunctions, mode: str, disagree: list[Any]) -> None:
    """Integer state that replicas left different values in has no value that is theirs."""
    if not any(map(bool, disagree)):
        return
    variables = [functions.model.non_trainable_variables[index] for index in functions.findings[mode].assigned]
    counters = [v for v in variables if jnp.issubdtype(v.dtype, jnp.integer) and not randomness.is_seed(v)]
    paths = [repr(v.path) for v, different in zip(counters, disagree, strict=True) if different]
    raise ValueError(
        f"The replicas of one step left different values in an integer variable of the model: {', '.join(paths)}. An integer that "
        f"the forward pass assigns must not depend on the rows."
    )


def tracked(functions: ReplicaFunctions, mode: str, before: list[Any], total: Contribution, rows: Any) -> list[Any]:
    """The metrics' state with what the replicas added, and with the global loss, unless the user's own step tracks it."""
    model, variables = functions.model, functions.model.metrics_variables
    values = [new if functions.alone else old + new for old, new in zip(before, total.metrics, strict=True)]
    if own_step.is_own(model, mode):
        return values
    with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
        keras_seam.loss_tracker(model).update_state(total.loss, sample_weight=rows)
        for index, tracker in enumerate(keras_seam.term_trackers(model)):
            tracker.update_state(total.terms[index], sample_weight=rows)
        return [scope.get_current_value(v) for v in variables]


def results(functions: ReplicaFunctions, state: Any) -> dict[str, Any]:
    """What the metrics say."""
    model = functions.model
    mapping = [*zip(model.metrics_variables, state[-1], strict=True), *zip(model.trainable_variables, state[0], strict=True)]
    with keras.StatelessScope(state_mapping=mapping):
        return jax.tree.map(jnp.asarray, dict(model.get_metrics_result()))
