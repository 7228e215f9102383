"""Captured arrays that take the place of a replica's rows: every replica would train on the same ones.

Not every captured array holds rows. Means, class weights and tables are the same for all replicas, and are meant to be. The program shows which
arrays hold rows: an array meets the batch, so that the code runs on its number of rows alone or takes more of the array for more rows; or a layer,
a loss or an optimizer gets the array and nothing of the replica's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import keras
import numpy as np

from unisono._src.checks.user_code.captured_arrays import (
    CapturedArray,
    find_captured_arrays,
    find_replicated_arrays,
    has_captured_source,
)
from unisono._src.checks.user_code.jaxpr import can_come_from, find_constants, find_unmarked_constants, is_among_constants
from unisono._src.checks.user_code.results import find_constant_operands, find_origins
from unisono._src.keras_private.trainer_state import get_raw_value
from unisono._src.replica import random_keys, refused_calls
from unisono._src.replica.variable_discovery import Trace
from unisono._src.typing import AnyArray, Shape, UserFunction


class Suspect(NamedTuple):
    """A constant of the program that may hold rows."""

    constant: AnyArray
    array: CapturedArray | keras.Variable
    """The captured array, or the variable, that the constant is or may come from."""
    how: str
    """The way by which the array reaches the code, in words."""


def refuse_undistributed_arrays(
    function: UserFunction, trace: Trace, trace_of: Callable[[int], Trace] | None, has_rows: bool, size: int, replicas: int
) -> None:
    """Refuse captured arrays that take the place of rows.

    Args:
        function: The function that replicas run.
        trace: The function, traced on a replica's rows.
        trace_of: Traces the function on another number of rows; None where the function gets values of an earlier run, too.
        has_rows: Whether the function gets rows.
        size: The number of the replica's rows.
        replicas: The number of replicas. A single replica may capture any array.
    """
    captured = find_captured_arrays(function) if replicas > 1 and find_nonvariable_constants(trace) else []
    if not captured:
        return
    replicated = [np.asarray(array) for array in find_replicated_arrays(function)]
    suspects = list(find_suspects(trace, captured, replicated))
    guilty = find_substitute_for_rows(trace, suspects) if has_rows else next(iter(suspects), None)
    if guilty is None and has_rows:
        guilty = find_suspect_meeting_rows(
            trace,
            trace_of,
            lambda trace: [*find_suspects(trace, captured, replicated), *find_unnamed_suspects(trace, replicated)],
            size,
        )
    if guilty is not None:
        refused_calls.refuse_undistributed(guilty.array, guilty.how, replicas)


def find_nonvariable_constants(trace: Trace) -> list[AnyArray]:
    """Return the constant arrays of the program that are no variables."""
    variables = {id(get_raw_value(variable)) for variable in trace.used}
    return [constant for constant in find_constants(trace.program) if id(constant) not in variables]


def find_user_constants(trace: Trace) -> list[AnyArray]:
    """Return the constant arrays that are no variables, and that no layer, loss or metric has by itself."""
    outside = {id(constant) for constant in find_unmarked_constants(trace.program, refused_calls.KERAS_MARK)}
    return [constant for constant in find_nonvariable_constants(trace) if id(constant) in outside]


def find_suspects(trace: Trace, captured: list[tuple[str, CapturedArray]], replicated: list[np.ndarray]) -> Iterator[Suspect]:
    """Yield the constants of the program that are captured arrays or rows of them, or may have been computed from them."""
    outside = {id(constant) for constant in find_user_constants(trace)}
    for constant in find_nonvariable_constants(trace):
        for name, array in captured:
            is_captured = is_among_constants(array, [constant]) and refused_calls.has_different_rows(array)
            may_be_computed = id(constant) in outside and can_come_from(np.asarray(constant), np.asarray(array))
            if is_captured or (may_be_computed and not is_replicated(constant, replicated)):
                yield Suspect(constant, array, f"by the name {name!r}")


def find_unnamed_suspects(trace: Trace, replicated: list[np.ndarray]) -> Iterator[Suspect]:
    """Yield the other constants whose rows differ, as labels that were turned into numbers."""
    for constant in find_user_constants(trace):
        if refused_calls.has_different_rows(constant) and not is_replicated(constant, replicated) and not is_row_index(constant):
            yield Suspect(constant, constant, "as a constant")


def is_replicated(constant: AnyArray, replicated: list[np.ndarray]) -> bool:
    return any(np.array_equal(constant, array) for array in replicated)


def is_row_index(constant: AnyArray) -> bool:
    """Return whether a constant counts the rows, as 0, 1, 2: code may index the replica's rows by it."""
    return np.array_equal(constant, np.arange(len(constant)))


def find_substitute_for_rows(trace: Trace, suspects: list[Suspect]) -> Suspect | None:
    """Return the suspect that a layer, a loss or an optimizer gets, with nothing of the replica's."""
    of_replica = {*range(trace.arrays), trace.replica_position}
    for _, results in trace.find_results("given", "loss", "vector", "gradients") if suspects else ():
        guilty = find_sole_suspect(trace, results, suspects, of_replica)
        if guilty is not None:
            return guilty
    return None


def find_sole_suspect(trace: Trace, results: Collection[int], suspects: list[Suspect], of_replica: set[int]) -> Suspect | None:
    """Return the suspect that the results are made of, if they contain nothing of the replica's: neither its rows nor its random numbers.

    `of_replica` are the positions of the program's arguments that belong to the replica.
    """
    origins = find_origins(trace.program, results)
    read = {id(constant) for constant in origins.constants}
    if origins.arguments & of_replica or read & find_seed_ids(trace):
        return None
    return next((suspect for suspect in suspects if id(suspect.constant) in read), None)


def find_seed_ids(trace: Trace) -> set[int]:
    """Return the ids of the constants that random numbers are drawn from: each replica draws others."""
    return {id(get_raw_value(variable)) for variable in trace.used if random_keys.is_seed_state(variable)}


def find_suspect_meeting_rows(
    trace: Trace, trace_of: Callable[[int], Trace] | None, suspects: Callable[[Trace], list[Suspect]], size: int
) -> Suspect | None:
    """Return the suspect that meets the replica's rows with as many rows, if the code fails on more rows, or takes more of the suspect then."""
    known = {id(suspect.constant): suspect for suspect in reversed(suspects(trace))}

    def find_met(trace: Trace, rows: int) -> dict[Shape, AnyArray]:
        """Return the constants that meet the rows, by the shape of a row of the operand."""
        of_replica = {*range(trace.arrays), trace.replica_position}
        operands = find_constant_operands(
            trace.program, of_replica, {id(suspect.constant) for suspect in suspects(trace)}, find_seed_ids(trace)
        )
        return {
            operand.shape[1:]: operand.constant for operand in operands if operand.shape[:1] == (rows,) and operand.has_its_rows
        }

    met = find_met(trace, size)
    if met and trace_of is not None:
        with contextlib.suppress(Exception):  # as of shapes that do not fit one another
            met_on_more = find_met(trace_of(2 * size), 2 * size)
            met = {shape: constant for shape, constant in met.items() if shape in met_on_more}
    return next((known[id(constant)] for constant in met.values()), None)


def make_suspicion(function: UserFunction, replicas: int) -> Callable[[AnyArray], bool]:
    """Return a function that says whether an array may come from a captured one.

    It is asked where a layer gets an array that is not computed from a replica's rows.
    """
    if replicas == 1:
        return lambda array: False
    if has_captured_source(function):
        return lambda array: True
    captured = find_captured_arrays(function)
    return lambda array: any(
        is_among_constants(source, [array])
        or can_come_from(np.asarray(array), np.asarray(source))
        or is_chosen_from(np.asarray(array), np.asarray(source))
        for _, source in captured
    )


def is_chosen_from(vector: np.ndarray, source: np.ndarray) -> bool:
    """Return whether a vector has only values of another vector, as labels that were chosen from it."""
    return vector.ndim == source.ndim == 1 and bool(np.isin(vector, source).all())
