"""State that replicas assign: a replica's contribution to it, and the state after the step.

Moving statistics are averaged by rows, counters must agree, random state moves on by rule. A variable's own `aggregation` goes before.
"""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np

from unisono._src.replica import random_keys
from unisono._src.replica.contribution import AssignedState
from unisono._src.typing import Array


def make_start_values(variables: list[keras.Variable], values: list[Array], replica: Array) -> list[Array]:
    """Return the state from which a replica starts: with random state of its own."""
    return [
        random_keys.derive_replica_key(value, replica) if random_keys.is_seed_state(variable) else value
        for variable, value in zip(variables, values, strict=True)
    ]


def collect_assigned(
    variables: list[keras.Variable],
    assigned: list[int],
    replaced: set[int],
    alone: bool,
    before: list[Array],
    after: list[Array],
    rows: int,
    replica: Array,
) -> AssignedState:
    """Return the replica's contribution to the state that replicas assign.

    Args:
        variables: The variables of the state.
        assigned: The positions of the variables that replicas assign.
        replaced: Those of them whose value before the replica's code does not read.
        alone: Whether there is one replica.
        before: The state before the step, which is the same for all replicas.
        after: The state after the replica's code.
        rows: The replica's rows.
        replica: Its number.
    """
    is_first = replica == 0
    contribution = AssignedState([], [], [], [], [])
    for index in assigned:
        variable = variables[index]
        old = before[index]
        new = after[index]
        if random_keys.is_seed_state(variable):
            growth = new - random_keys.derive_replica_key(old, replica)
            contribution.draws.append((jnp.where(is_first, growth, jnp.zeros_like(growth)), growth))
        elif is_added(variable, alone):
            contribution.advances.append(find_advance(variable, old, new, index in replaced, is_first))
        elif jnp.issubdtype(new.dtype, jnp.floating) or (alone and not is_counter_dtype(new.dtype)):
            contribution.float_changes.append(
                new if alone else (new.astype(jnp.float32) - find_finite(old).astype(jnp.float32)) * rows
            )
        elif is_counter_dtype(new.dtype):
            growth = widen_counter(new) - widen_counter(old)
            contribution.counter_changes.append((jnp.where(is_first, growth, jnp.zeros_like(growth)), growth, growth * growth))
        else:
            raise ValueError(
                f"The forward pass assigns {variable.path!r} of dtype {variable.dtype}: the values of {variable.dtype} that "
                f"replicas leave cannot be merged. Keep it as a float (averaged), an integer or a bool (equal on all replicas)."
            )
    if contribution.draws or contribution.counter_changes:
        contribution.is_first.append(is_first.astype(jnp.int32))
    return contribution


def check_has_sum(variable: keras.Variable, value: Array) -> None:
    """Refuse a sum over replicas of bools."""
    if jnp.issubdtype(value.dtype, jnp.bool_):
        raise ValueError(
            f"The forward pass assigns {variable.path!r} of dtype bool with aggregation='sum', but bools have no sum. Make it an "
            f"integer, or write aggregation='only_first_replica'."
        )


def is_added(variable: keras.Variable, alone: bool) -> bool:
    """Return whether the variable's `aggregation` says how the values of several replicas become one: by the growth in all replicas, or
    in the first one."""
    return not alone and variable.aggregation in ("sum", "only_first_replica")


def is_counter_dtype(dtype: np.dtype) -> bool:
    """Return whether state of this dtype must be equal on all replicas."""
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)


def find_advance(variable: keras.Variable, old: Array, new: Array, is_replaced: bool, is_first: Array) -> Array:
    """Return what a replica adds to a variable whose `aggregation` is a sum, or the growth in the first replica."""
    growth = widen_counter(new) - find_base(variable, old, is_replaced)
    if variable.aggregation != "sum":
        return jnp.where(is_first, growth, jnp.zeros_like(growth))
    check_has_sum(variable, new)
    return growth


def find_base(variable: keras.Variable, old: Array, is_replaced: bool) -> Array:
    """Return the value to which the growth of the replicas is added: none where a sum over replicas is made of new values alone."""
    base = widen_counter(old)
    return jnp.zeros_like(base) if is_replaced and variable.aggregation == "sum" else find_finite(base)


def find_finite(value: Array) -> Array:
    """Return 0 in place of what is not finite, and all other values as they are: a minimum that begins at infinity grows by no number."""
    return jnp.where(jnp.isfinite(value), value, 0).astype(value.dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value


def widen_counter(value: Array) -> Array:
    """Return integers and bools as numbers of 32 bits, whose sums of squares do not soon overflow; all other values as they are."""
    return value.astype(jnp.int32) if is_counter_dtype(value.dtype) and value.dtype.itemsize < 4 else value


def merge_assigned(
    variables: list[keras.Variable],
    assigned: list[int],
    replaced: set[int],
    alone: bool,
    before: list[Array],
    total: AssignedState,
    rows: Array,
    present: Array,
) -> tuple[list[Array], list[Array]]:
    """Return (the state after the step, for each counter whether replicas disagree on it).

    `rows` are the rows of the global batch, `present` is how many replicas have rows.
    """
    after = list(before)
    disagree: list[Array] = []
    moving = iter(total.float_changes)
    counters = iter(total.counter_changes)
    draws = iter(total.draws)
    grown = iter(total.advances)
    for index in assigned:
        old = before[index]
        if random_keys.is_seed_state(variables[index]):
            after[index] = old + choose_growth(*next(draws), present, total.is_first[0])
        elif is_added(variables[index], alone):
            base = find_base(variables[index], old, index in replaced)
            after[index] = (base + next(grown)).astype(old.dtype)
        elif not is_counter_dtype(old.dtype):
            change = next(moving)
            after[index] = change if alone else (find_finite(old).astype(jnp.float32) + change / rows).astype(old.dtype)
        else:
            first, growth, squares = next(counters)
            first = choose_growth(first, growth, present, total.is_first[0])
            after[index] = (widen_counter(old) + first).astype(old.dtype)
            count = present.astype(first.dtype)  # the squares too: 1, 0 and 2 add up to three times the first
            disagree.append(jnp.any((growth != first * count) | (squares != first * first * count)))
    return after, disagree


def choose_growth(first: Array, growth: Array, present: Array, has_first: Array) -> Array:
    """Return the growth in each replica, from that in the first one and from their sum: of the first one, or the mean where it has no rows."""
    return jnp.where(has_first > 0, first, growth // present.astype(growth.dtype))


def check_counters(variables: list[keras.Variable], assigned: list[int], disagree: list[Array]) -> None:
    """Refuse integers and bools that replicas left at different values: such state has no value after the step."""
    if not any(map(bool, disagree)):
        return
    assigned_variables = [variables[index] for index in assigned]
    counters = [
        variable
        for variable in assigned_variables
        if is_counter_dtype(jnp.dtype(variable.dtype))
        and not random_keys.is_seed_state(variable)
        and not is_added(variable, False)
    ]
    paths = [repr(variable.path) for variable, is_different in zip(counters, disagree, strict=True) if is_different]
    raise ValueError(
        f"The replicas of one step left different values in an integer or a bool of the model: {', '.join(paths)}. An integer or a bool "
        f"that the forward pass assigns must not depend on the rows. Keep what does as a float, whose changes are averaged over the rows, "
        f"or make the variable with aggregation='only_first_replica'."
    )
