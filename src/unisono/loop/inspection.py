"""A traced function of the user's is looked at before it is compiled: for what would train something else in silence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from unisono.loop.closure import arrays_around, check_nothing_left
from unisono.loop.evidence import Sources
from unisono.loop.traces import check_collectives, constants_of, is_among
from unisono.replica import mistakes
from unisono.replica.discovery import Trace


def inspect(name: str, function: Callable[..., Any], trace: Trace, strategy: Any) -> None:
    strategy.check_variables(trace.used, list(trace.code.scope.assigned.values()))
    check_nothing_left(function)
    check_collectives(name, trace.program)
    check_means(trace, strategy.num_replicas_in_sync)
    check_arrays(function, trace, strategy.num_replicas_in_sync)


def check_means(trace: Trace, replicas: int) -> None:
    """Mean metrics must not be fed with shares of a loss, nor with sums of them and others."""
    noted, sources = trace.noted, Sources(trace.program, trace.arrays)
    shares = [share for _, share in noted.get("share", [])]
    for metric, value in noted.get("fed", []):
        if sources.reaches(value, shares):
            mistakes.refuse_share(metric, replicas)


def check_arrays(function: Callable[..., Any], trace: Trace, replicas: int) -> None:
    """Arrays that the function finds by a name must not have become constants of the program."""
    constants = constants_of(trace.program)
    for name, array in arrays_around(function) if constants else []:
        if is_among(array, constants) and mistakes.rows_differ(array):
            mistakes.refuse_undistributed(array, f"by the name {name!r}", replicas)


@contextlib.contextmanager
def naming(function: Callable[..., Any], replicas: int) -> Iterator[None]:
    """An error about an array says by what name the function finds it."""
    try:
        yield
    except mistakes.UndistributedError as error:
        for name, array in arrays_around(function):
            if array is error.array:
                mistakes.refuse_undistributed(array, f"by the name {name!r}", replicas)
        raise
