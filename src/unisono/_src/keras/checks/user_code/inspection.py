"""Check a traced user function before it is compiled.

The checks are for what would silently train something else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from unisono._src.keras.checks.user_code.captured_arrays import find_captured_arrays, refuse_compiled_captures
from unisono._src.keras.checks.user_code.captures import Capture
from unisono._src.keras.checks.user_code.inspected_code import InspectedCode
from unisono._src.keras.checks.user_code.jaxpr import check_collectives, find_origins
from unisono._src.keras.checks.user_code.undistributed_arrays import (
    check_data_in_variables,
    check_numpy_draws,
    refuse_undistributed_arrays,
)
from unisono._src.keras.private.trainer_state import get_raw_value
from unisono._src.keras.replica import refused_calls
from unisono._src.programs.operands import get_shape


def inspect_program(code: InspectedCode) -> None:
    """Check a function that was traced."""
    refuse_compiled_captures(code.captures)
    check_collectives(code.name, code.sources.program)
    check_numpy_draws(code)
    refuse_undistributed_arrays(code)
    check_data_in_variables(code)
    check_same_gradients(code)
    check_summed_gradients(code)


def find_returned_shares(code: InspectedCode) -> frozenset[int]:
    """Find which returned arrays are shares of a loss, by their positions."""
    returned = enumerate(code.trace.returned)
    return frozenset(position for position, variable in returned if code.sources.can_reach(variable, code.shares))


def check_same_gradients(code: InspectedCode) -> None:
    """Refuse gradients in which nothing comes from a replica's rows. All replicas have the same, and they would be added up."""
    # Where the code has losses, they are checked by their growth with the rows.
    if code.replicas == 1 or code.trace.noted.keys() & {"loss", "vector"}:
        return
    for optimizer, results in code.trace.find_results("gradients"):
        if not find_origins(code.sources.program, results).arguments & code.sources.replica_positions:
            refused_calls.refuse_same_gradients(optimizer, code.replicas)


def check_summed_gradients(code: InspectedCode) -> None:
    """Refuse gradients that contain a sum over all replicas.

    Earlier runs left it: it would be added up over replicas once more.
    """
    used = [variable for variable in code.trace.used if isinstance(variable, keras.Variable)] if code.replicas > 1 else []
    sums = {id(get_raw_value(variable)): variable for variable in used if variable.aggregation == "sum"}
    outputs = code.sources.program.jaxpr.outvars
    for optimizer, results in code.trace.find_results("gradients") if sums else []:
        for result in results:
            for constant in find_origins(code.sources.program, [result]).constants:
                variable = sums.get(id(constant))
                if variable is not None and tuple(variable.shape) == get_shape(outputs[result]):
                    refused_calls.refuse_summed_gradients(optimizer, variable, code.replicas)


@contextlib.contextmanager
def name_array_in_errors(captures: list[Capture], replicas: int) -> Iterator[None]:
    """Name the array in an error as the function finds it."""
    try:
        yield
    except refused_calls.UndistributedError as error:
        for name, array in find_captured_arrays(captures):
            if array is error.array:
                refused_calls.refuse_undistributed(array, f"by the name {name!r}", replicas)
        raise
