"""Arrays that replica code finds by a name, and that take the place of a replica's rows: every replica would train on the same ones.

Not every array is rows. Means, class weights and tables are the same for all, and are meant to be. What is rows shows in the program: it meets
the batch, so that the code runs on its number of rows alone or takes more of it for more rows; or a layer, a loss or an optimizer gets it
and nothing of the replica's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from unisono._src import keras_private
from unisono._src.checks.user_code.captured_arrays import arrays_around, gives_around, replicated_around
from unisono._src.checks.user_code.jaxpr import constants_of, constants_outside, is_among, may_come_from
from unisono._src.checks.user_code.results import made_of, meetings
from unisono._src.replica import random_keys, refused_calls
from unisono._src.replica.variable_discovery import Trace


class Suspect(NamedTuple):
    """A constant of the program that may be rows."""

    constant: Any
    array: Any
    """The one around, or the variable, that it is or may come from."""
    how: str
    """It reaches the code."""


def check_arrays(
    function: Callable[..., Any], trace: Trace, trace_of: Callable[[int], Trace] | None, has_rows: bool, size: int, replicas: int
) -> None:
    """Refuse arrays around that take the place of rows.

    Args:
        function: The function that replicas run.
        trace: The function on a replica's rows.
        trace_of: Traces it on another number of rows; None where it gets values of an earlier run, too.
        has_rows: Whether it gets rows.
        size: The rows of the replica.
        replicas: How many there are. One alone may have its arrays where it wants.
    """
    around = arrays_around(function) if replicas > 1 and own_constants(trace) else []
    if not around:
        return
    meant = [np.asarray(array) for array in replicated_around(function)]
    suspects = list(suspects_in(trace, around, meant))
    guilty = in_place_of_rows(trace, suspects) if has_rows else next(iter(suspects), None)
    if guilty is None and has_rows:
        guilty = meeting_rows(trace, trace_of, lambda trace: [*suspects_in(trace, around, meant), *nameless(trace, meant)], size)
    if guilty is not None:
        refused_calls.refuse_undistributed(guilty.array, guilty.how, replicas)


def own_constants(trace: Trace) -> list[Any]:
    """The arrays in the program that are no variables."""
    variables = {id(keras_private.raw_value(v)) for v in trace.used}
    return [constant for constant in constants_of(trace.program) if id(constant) not in variables]


def unmarked(trace: Trace) -> list[Any]:
    """Those among them that are no layer's, loss' or metric's own."""
    outside = {id(constant) for constant in constants_outside(trace.program, refused_calls.MARK)}
    return [constant for constant in own_constants(trace) if id(constant) in outside]


def suspects_in(trace: Trace, around: list[tuple[str, Any]], meant: list[Any]) -> Iterator[Suspect]:
    """The constants of the program that are arrays around, rows of them, or look as if they were computed from them."""
    outside = {id(constant) for constant in unmarked(trace)}
    for constant in own_constants(trace):
        for name, array in around:
            itself = is_among(array, [constant]) and refused_calls.rows_differ(array)
            computed = id(constant) in outside and may_come_from(np.asarray(constant), np.asarray(array))
            if itself or (computed and not is_meant(constant, meant)):
                yield Suspect(constant, array, f"by the name {name!r}")


def nameless(trace: Trace, meant: list[Any]) -> Iterator[Suspect]:
    """Other constants, whose rows differ: labels that were turned into numbers, say."""
    for constant in unmarked(trace):
        if refused_calls.rows_differ(constant) and not is_meant(constant, meant) and not is_count(constant):
            yield Suspect(constant, constant, "as a constant")


def is_meant(constant: Any, meant: list[Any]) -> bool:
    return any(np.array_equal(constant, of) for of in meant)


def is_count(constant: Any) -> bool:
    """Whether it counts the rows, 0, 1, 2 and so on: the replica's own, by which code may take them."""
    return np.array_equal(constant, np.arange(len(constant)))


def in_place_of_rows(trace: Trace, suspects: list[Suspect]) -> Suspect | None:
    """Return what a layer, a loss or an optimizer gets, with nothing of the replica's."""
    own = {*range(trace.arrays), trace.number_of_replica}
    for _, results in trace.results_of("given", "loss", "vector", "gradients") if suspects else ():
        guilty = among_constants(trace, results, suspects, own)
        if guilty is not None:
            return guilty
    return None


def among_constants(trace: Trace, results: Collection[int], suspects: list[Suspect], own: set[int]) -> Suspect | None:
    """Return the suspect of which the results are made, if they are made of nothing of the replica's: neither its rows nor what it draws."""
    found = made_of(trace.program, results)
    read = {id(constant) for constant in found.constants}
    if found.arguments & own or read & seeds_of(trace):
        return None
    return next((suspect for suspect in suspects if id(suspect.constant) in read), None)


def seeds_of(trace: Trace) -> set[int]:
    """Return the ids of the constants from which replicas draw, each other numbers."""
    return {id(keras_private.raw_value(v)) for v in trace.used if random_keys.is_seed(v)}


def meeting_rows(
    trace: Trace, trace_of: Callable[[int], Trace] | None, suspects: Callable[[Trace], list[Suspect]], size: int
) -> Suspect | None:
    """Return what meets the replica's rows with as many of its own, if the code cannot do with it on more rows, or takes more of it then."""
    known = {id(suspect.constant): suspect for suspect in reversed(suspects(trace))}

    def met(trace: Trace, rows: int) -> dict[tuple[int, ...], Any]:
        """By the shape of what meets the rows, the constant."""
        own = {*range(trace.arrays), trace.number_of_replica}
        found = meetings(trace.program, own, {id(suspect.constant) for suspect in suspects(trace)}, seeds_of(trace))
        return {meeting.shape[1:]: meeting.constant for meeting in found if meeting.shape[:1] == (rows,) and meeting.has_its_rows}

    here = met(trace, size)
    if here and trace_of is not None:
        with contextlib.suppress(Exception):  # as of shapes that do not fit one another
            there = met(trace_of(2 * size), 2 * size)
            here = {shape: constant for shape, constant in here.items() if shape in there}
    return next((known[id(constant)] for constant in here.values()), None)


def suspicion(function: Callable[..., Any], replicas: int) -> Callable[[Any], bool]:
    """Return whether an array that nobody computes from a replica's rows may come from one around; asked where a layer gets it."""
    if replicas == 1:
        return lambda array: False
    if gives_around(function):
        return lambda array: True
    around = arrays_around(function)
    return lambda array: any(
        is_among(of, [array])
        or may_come_from(np.asarray(array), np.asarray(of))
        or is_chosen_from(np.asarray(array), np.asarray(of))
        for _, of in around
    )


def is_chosen_from(array: np.ndarray, of: np.ndarray) -> bool:
    """Whether a vector has no other values than another one, as labels that are chosen have."""
    return array.ndim == of.ndim == 1 and bool(np.isin(array, of).all())
