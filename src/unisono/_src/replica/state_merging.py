"""State that replicas assign: what one of them hands on, and what becomes of it.

Moving statistics are averaged by rows, counters must agree, random state moves on by rule; a variable's own `aggregation` goes before.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from unisono._src.replica import random_keys
from unisono._src.replica.contribution import Assigned


def for_replica(variables: list[Any], values: list[Any], replica: Any) -> list[Any]:
    """The state from which a replica starts: with random state of its own."""
    return [
        random_keys.for_replica(value, replica) if random_keys.is_seed(variable) else value
        for variable, value in zip(variables, values, strict=True)
    ]


def handed_on(
    variables: list[Any], assigned: list[int], alone: bool, before: list[Any], after: list[Any], rows: int, replica: Any
) -> Assigned:
    """What a replica's code assigned.

    Args:
        variables: The variables of the state.
        assigned: The positions of those that replicas assign.
        alone: Whether there is one replica.
        before: The state before, of no replica.
        after: The state that the replica leaves.
        rows: Its rows.
        replica: Its number.
    """
    first = replica == 0
    moving, counters, grown = [], [], []
    for index in assigned:
        variable, old, new = variables[index], before[index], after[index]
        if random_keys.is_seed(variable):
            growth = new - random_keys.for_replica(old, replica)
            grown.append(jnp.where(first, growth, jnp.zeros_like(growth)))
        elif is_added(variable, alone):
            growth = counted(new) - counted(old)
            of_all = variable.aggregation == "sum"
            if of_all and jnp.issubdtype(new.dtype, jnp.bool_):
                raise ValueError(
                    f"The forward pass assigns {variable.path!r} of dtype bool with aggregation='sum', but bools have no sum. Make it an "
                    f"integer, or write aggregation='only_first_replica'."
                )
            grown.append(growth if of_all else jnp.where(first, growth, jnp.zeros_like(growth)))
        elif jnp.issubdtype(new.dtype, jnp.floating) or (alone and not is_counted(new.dtype)):
            moving.append(new if alone else (new.astype(jnp.float32) - old.astype(jnp.float32)) * rows)
        elif is_counted(new.dtype):
            growth = counted(new) - counted(old)
            counters.append((jnp.where(first, growth, jnp.zeros_like(growth)), growth, growth * growth))
        else:
            raise ValueError(
                f"The forward pass assigns {variable.path!r} of dtype {variable.dtype}: the values of {variable.dtype} that "
                f"replicas leave cannot be merged. Keep it as a float (averaged), an integer or a bool (equal on all replicas)."
            )
    return Assigned(moving, counters, grown)


def is_added(variable: Any, alone: bool) -> bool:
    """Whether the variable says by itself how the values of several replicas become one: by what it grows in all of them, or in the
    first."""
    return not alone and variable.aggregation in ("sum", "only_first_replica")


def is_counted(dtype: Any) -> bool:
    """Return whether state of this dtype must be equal on all replicas."""
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)


def counted(value: Any) -> Any:
    """Return integers and bools as numbers of 32 bits, whose sums of squares do not wrap around soon; all else as it is."""
    return value.astype(jnp.int32) if is_counted(value.dtype) and value.dtype.itemsize < 4 else value


def merged(
    variables: list[Any], assigned: list[int], alone: bool, before: list[Any], total: Assigned, rows: Any, present: Any
) -> tuple[list[Any], list[Any]]:
    """The state that the replicas leave, and for each counter whether they disagree on it. `rows` are those of the global
    batch, of which so many replicas as `present` says have some."""
    after, disagree = list(before), []
    moving, counters, grown = iter(total.moving), iter(total.counters), iter(total.grown)
    for index in assigned:
        old = before[index]
        if random_keys.is_seed(variables[index]) or is_added(variables[index], alone):
            after[index] = (counted(old) + next(grown)).astype(old.dtype)
        elif not is_counted(old.dtype):
            change = next(moving)
            after[index] = change if alone else (old.astype(jnp.float32) + change / rows).astype(old.dtype)
        else:
            first, every, squares = next(counters)
            after[index] = (counted(old) + first).astype(old.dtype)
            there = present.astype(first.dtype)  # the squares too: 1, 0 and 2 add up to three times the first
            disagree.append(jnp.any((every != first * there) | (squares != first * first * there)))
    return after, disagree


def check_counters(variables: list[Any], assigned: list[int], disagree: list[Any]) -> None:
    """Integers and bools that replicas left different values in have no value that is theirs."""
    if not any(map(bool, disagree)):
        return
    of = [variables[index] for index in assigned]
    counters = [v for v in of if is_counted(jnp.dtype(v.dtype)) and not random_keys.is_seed(v) and not is_added(v, False)]
    paths = [repr(v.path) for v, different in zip(counters, disagree, strict=True) if different]
    raise ValueError(
        f"The replicas of one step left different values in an integer or a bool of the model: {', '.join(paths)}. An integer or a bool "
        f"that the forward pass assigns must not depend on the rows. Keep what does as a float, whose changes are averaged over the rows, "
        f"or make the variable with aggregation='only_first_replica'."
    )
