"""Variables that hold a whole dataset, and that take the place of a replica's rows in replica code.

Variables are state more often than arrays are. A variable holds rows if it belongs to no layer, and meets the batch as rows do (see
`undistributed_arrays`), or a layer, a loss or a metric gets it and it meets the batch nowhere.
"""

from __future__ import annotations

from collections.abc import Callable

import keras

from unisono._src.checks.user_code.captured_arrays import find_replicated_arrays
from unisono._src.checks.user_code.results import find_constant_operands
from unisono._src.checks.user_code.undistributed_arrays import Suspect, find_sole_suspect, find_suspect_meeting_rows
from unisono._src.keras_private.trainer_state import get_raw_value
from unisono._src.ownership import OwnedObjects
from unisono._src.replica import random_keys, refused_calls
from unisono._src.replica.variable_discovery import Trace
from unisono._src.typing import UserFunction


def check_data_in_variables(
    function: UserFunction, trace: Trace, trace_of: Callable[[int], Trace] | None, size: int, owned: OwnedObjects, replicas: int
) -> None:
    """Refuse variables that take the place of rows, as variables that hold a whole dataset do.

    Args:
        function: The function that replicas run.
        trace: The function, traced on a replica's rows.
        trace_of: Traces the function on another number of rows; None where the function gets values of an earlier run, too.
        size: The number of the replica's rows.
        owned: The objects that were made in the strategy's scope.
        replicas: The number of replicas.
    """
    variables = find_variables_with_rows(function, trace, owned) if replicas > 1 else []
    if not variables:
        return

    suspects = [Suspect(get_raw_value(variable), variable, f"as the variable {variable.path!r}") for variable in variables]
    guilty = find_suspect_meeting_rows(trace, trace_of, lambda _: suspects, size) or find_suspect_apart_from_rows(trace, suspects)
    if guilty is not None:
        refused_calls.refuse_undistributed(guilty.array, guilty.how, replicas)


def find_variables_with_rows(function: UserFunction, trace: Trace, owned: OwnedObjects) -> list[keras.Variable]:
    """Return the variables that may hold rows of data: they belong to no layer or optimizer, are neither trained nor assigned, and have rows that
    differ. Random state is left out, and so are variables that the user has replicated."""
    not_data = owned.layer_variable_ids | {id(variable) for optimizer in owned.optimizers for variable in optimizer.variables}
    not_data |= {id(variable) for variable in trace.code.scope.assigned.values()} | {
        id(variable) for variable in find_replicated_arrays(function)
    }
    candidates = {
        id(variable): variable for variable in trace.used if isinstance(variable, keras.Variable) and id(variable) not in not_data
    }
    untrained = [
        variable
        for variable in candidates.values()
        if not variable.trainable and not random_keys.is_seed_state(variable) and len(variable.shape)
    ]
    return [variable for variable in untrained if refused_calls.has_different_rows(get_raw_value(variable))]


def find_suspect_apart_from_rows(trace: Trace, suspects: list[Suspect]) -> Suspect | None:
    """Return the suspect that a layer, a loss or a metric gets with nothing of the replica's, and that meets nothing of the replica's later."""
    of_replica = {*range(trace.arrays), trace.replica_position}
    met = {
        id(operand.constant)
        for operand in find_constant_operands(trace.program, of_replica, {id(suspect.constant) for suspect in suspects})
    }
    alone = [suspect for suspect in suspects if id(suspect.constant) not in met]
    outputs = trace.program.jaxpr.outvars
    for _, results in trace.find_results("given", "gave", "vector", "fed", "update") if alone else ():
        rows = [result for result in results if outputs[result].aval.shape[:1] > (1,)]
        guilty = find_sole_suspect(trace, rows, alone, of_replica) if rows else None
        if guilty is not None:
            return guilty
    return None
