"""Variables of the user's own that hold a whole dataset, and that take the place of a replica's rows in replica code.

Variables are state, more often than arrays are. Rows are those of the user's own, which belong to no layer, that meet the batch as rows do (see
`undistributed`), or that a layer, a loss or a metric gets without meeting the batch anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from unisono._src import keras_private
from unisono._src.checks.user_code.captured_arrays import replicated_around
from unisono._src.checks.user_code.results import meetings
from unisono._src.checks.user_code.undistributed_arrays import Suspect, among_constants, meeting_rows
from unisono._src.ownership import Owned
from unisono._src.replica import random_keys, refused_calls
from unisono._src.replica.variable_discovery import Trace


def check_variables(
    function: Callable[..., Any], trace: Trace, trace_of: Callable[[int], Trace] | None, size: int, owned: Owned, replicas: int
) -> None:
    """Refuse variables that take the place of rows, as those that hold a whole dataset.

    Args:
        function: The function that replicas run.
        trace: The function on a replica's rows.
        trace_of: As in `check_arrays`.
        size: The rows of the replica.
        owned: What was made in the strategy's scope.
        replicas: How many there are.
    """
    held = variables_with_rows(function, trace, owned) if replicas > 1 else []
    if not held:
        return

    suspects = [Suspect(keras_private.raw_value(v), v, f"as the variable {v.path!r}") for v in held]
    guilty = meeting_rows(trace, trace_of, lambda _: suspects, size) or never_meeting_rows(trace, suspects)
    if guilty is not None:
        refused_calls.refuse_undistributed(guilty.array, guilty.how, replicas)


def variables_with_rows(function: Callable[..., Any], trace: Trace, owned: Owned) -> list[Any]:
    """Return the variables that may hold rows of data: the user's own, of rows that differ, which are not trained and which the code does not
    assign. Random state is not among them, nor what the user has said to be for all."""
    not_data = owned.variables_of_layers | {id(v) for optimizer in owned.optimizers for v in optimizer.variables}
    not_data |= {id(v) for v in trace.code.scope.assigned.values()} | {id(v) for v in replicated_around(function)}
    found = {id(v): v for v in trace.used if isinstance(v, keras.Variable) and id(v) not in not_data}
    may_be = [v for v in found.values() if not v.trainable and not random_keys.is_seed(v) and len(v.shape)]
    return [v for v in may_be if refused_calls.rows_differ(keras_private.raw_value(v))]


def never_meeting_rows(trace: Trace, suspects: list[Suspect]) -> Suspect | None:
    """Return what a layer, a loss or a metric gets, with nothing of the replica's there, and with which nothing of the replica's meets later."""
    own = {*range(trace.arrays), trace.number_of_replica}
    met = {id(meeting.constant) for meeting in meetings(trace.program, own, {id(suspect.constant) for suspect in suspects})}
    alone = [suspect for suspect in suspects if id(suspect.constant) not in met]
    outputs = trace.program.jaxpr.outvars
    for _, results in trace.results_of("given", "gave", "vector", "fed", "update") if alone else ():
        rows = [result for result in results if outputs[result].aval.shape[:1] > (1,)]
        guilty = among_constants(trace, rows, alone, own) if rows else None
        if guilty is not None:
            return guilty
    return None
