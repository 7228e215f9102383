"""Arrays that take the place of a replica's rows.

They are captured, or variables, or drawn by NumPy. Every replica would train on the same rows. But not every captured array holds
rows. Means, class weights and tables are the same for all replicas, and are meant to be. The jaxpr shows which arrays hold rows:
an array meets the batch, so that the code runs on its number of rows alone or takes more of the array for more rows; or a layer,
a loss or an optimizer gets the array and nothing of the replica's.

Variables are state more often than arrays are. A variable holds rows if it belongs to no layer, and meets the batch as rows do,
or a layer, a loss or a metric gets it and it meets the batch nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import keras
import numpy as np

from unisono._src.keras.checks.user_code.captured_arrays import (
    can_come_from,
    find_captured_arrays,
    find_constant_operands,
    is_among_constants,
    is_chosen_from,
    is_source_of_items,
)
from unisono._src.keras.checks.user_code.captures import Capture
from unisono._src.keras.checks.user_code.inspected_code import InspectedCode
from unisono._src.keras.checks.user_code.jaxpr import find_constants, find_origins, find_unmarked_constants
from unisono._src.keras.checks.user_code.provenance import Provenance
from unisono._src.keras.private.trainer_state import get_raw_value
from unisono._src.keras.replica import random_keys, refused_calls
from unisono._src.keras.replica.variable_discovery import Trace
from unisono._src.programs.operands import get_shape
from unisono._src.typing import AnyArray, LibraryArray, Shape


class Suspect(NamedTuple):
    """A constant of the jaxpr that may hold rows."""

    constant: AnyArray
    array: LibraryArray | keras.Variable
    """The captured array or variable behind the constant."""
    how: str
    """How the array reaches the code, in words."""


def refuse_undistributed_arrays(code: InspectedCode) -> None:
    """Refuse captured arrays that take the place of rows. A single replica may capture any array."""
    if code.replicas == 1 or not code.captured_arrays:
        return
    suspects = list(find_suspects(code, code.trace))
    if code.has_rows:
        guilty = find_substitute_for_rows(code.sources, suspects, ("given", "loss", "vector", "gradients"))
        guilty = guilty or find_suspect_meeting_rows(
            code, lambda trace: [*find_suspects(code, trace), *find_unnamed_suspects(code, trace)]
        )
    else:
        guilty = next(iter(suspects), None)
    if guilty is not None:
        refused_calls.refuse_undistributed(guilty.array, guilty.how, code.replicas)


def find_nonvariable_constants(trace: Trace) -> list[AnyArray]:
    """Find the constant arrays of the jaxpr that are no variables."""
    variables = {id(get_raw_value(variable)) for variable in trace.used}
    return [constant for constant in find_constants(trace.program) if id(constant) not in variables]


def find_user_constants(trace: Trace) -> list[AnyArray]:
    """Find the constants of user code, which are no variables.

    Those that layers, losses and metrics have by themselves are left out.
    """
    outside = {id(constant) for constant in find_unmarked_constants(trace.program, refused_calls.KERAS_MARK)}
    return [constant for constant in find_nonvariable_constants(trace) if id(constant) in outside]


def find_suspects(code: InspectedCode, trace: Trace) -> Iterator[Suspect]:
    """Yield the constants that may come from captured arrays.

    They are such arrays, rows of them, or may have been computed from them.
    """
    outside = {id(constant) for constant in find_user_constants(trace)}
    for constant in find_nonvariable_constants(trace):
        is_own = id(constant) in outside and not code.is_replicated(constant)
        for name, array in code.captured_arrays:
            is_captured = is_among_constants(array, [constant]) and refused_calls.has_different_rows(array)
            if is_captured or (is_own and can_come_from(np.asarray(constant), np.asarray(array))):
                yield Suspect(constant, array, f"by the name {name!r}")


def find_unnamed_suspects(code: InspectedCode, trace: Trace) -> Iterator[Suspect]:
    """Yield the other constants whose rows differ. Labels that were turned into numbers are such constants."""
    for constant in find_user_constants(trace):
        is_row_index = np.array_equal(constant, np.arange(len(constant)))  # by 0, 1, 2 code may index the replica's rows
        if refused_calls.has_different_rows(constant) and not code.is_replicated(constant) and not is_row_index:
            yield Suspect(constant, constant, "as a constant")


def find_substitute_for_rows(
    sources: Provenance, suspects: list[Suspect], kinds: Sequence[str], rows_only: bool = False
) -> Suspect | None:
    """Find the suspect from which these notes follow without the replica.

    Nothing of the replica is in them: neither rows nor random numbers.

    `rows_only`: whether only arrays of several rows are looked at.
    """
    seeds = find_seed_ids(sources.trace)
    outputs = sources.program.jaxpr.outvars
    for _, results in sources.trace.find_results(*kinds) if suspects else ():
        chosen = [result for result in results if not rows_only or get_shape(outputs[result])[:1] > (1,)]
        origins = find_origins(sources.program, chosen)
        read = {id(constant) for constant in origins.constants}
        guilty = next((suspect for suspect in suspects if id(suspect.constant) in read), None)
        if guilty is not None and not (origins.arguments & sources.replica_positions or read & seeds):
            return guilty
    return None


def find_seed_ids(trace: Trace) -> set[int]:
    """Find the ids of the constants that random numbers are drawn from. Each replica draws others."""
    return {id(get_raw_value(variable)) for variable in trace.used if random_keys.is_seed_state(variable)}


def find_suspect_meeting_rows(code: InspectedCode, suspects: Callable[[Trace], list[Suspect]]) -> Suspect | None:
    """Find the suspect that is paired with the replica's rows.

    It has an equal number of rows, and the code either fails on more rows, or then takes more of the suspect.
    """
    known = {id(suspect.constant): suspect for suspect in reversed(suspects(code.trace))}

    def find_met(sources: Provenance, rows: int) -> dict[Shape, AnyArray]:
        """Find the constants that meet the rows, by the operand's row shape."""
        ids = {id(suspect.constant) for suspect in suspects(sources.trace)}
        operands = find_constant_operands(sources, ids, find_seed_ids(sources.trace))
        return {
            operand.shape[1:]: operand.constant for operand in operands if operand.shape[:1] == (rows,) and operand.has_its_rows
        }

    met = find_met(code.sources, code.size)
    if met and code.trace_of is not None:
        try:
            on_more = code.trace_of(2 * code.size)
        except Exception:  # of the user's code, such as shapes that do not fit: whether it fails is the question
            on_more = None
        if on_more is not None:
            met_on_more = find_met(on_more, 2 * code.size)
            met = {shape: constant for shape, constant in met.items() if shape in met_on_more}
    return next((known[id(constant)] for constant in met.values()), None)


def check_data_in_variables(code: InspectedCode) -> None:
    """Refuse variables that take the place of rows. They may hold a whole dataset."""
    variables = find_variables_with_rows(code) if code.replicas > 1 else []
    if not variables:
        return
    suspects = [Suspect(get_raw_value(variable), variable, f"as the variable {variable.path!r}") for variable in variables]
    guilty = find_suspect_meeting_rows(code, lambda _: suspects)
    if guilty is None:
        met = {
            id(operand.constant)
            for operand in find_constant_operands(code.sources, {id(suspect.constant) for suspect in suspects})
        }
        alone = [suspect for suspect in suspects if id(suspect.constant) not in met]
        kinds = ("given", "gave", "vector", "fed", "update")
        guilty = find_substitute_for_rows(code.sources, alone, kinds, rows_only=True)
    if guilty is not None:
        refused_calls.refuse_undistributed(guilty.array, guilty.how, code.replicas)


def find_variables_with_rows(code: InspectedCode) -> list[keras.Variable]:
    """Find the variables that may hold rows of data.

    They belong to no layer or optimizer, are neither trained nor assigned, and have rows that differ. Random state is left out,
    and so are variables that the user has replicated.
    """
    owned = code.strategy.owned
    of_optimizers = [variable for optimizer in owned.optimizers for variable in optimizer.variables]
    others = [*of_optimizers, *code.trace.code.scope.assigned.values(), *code.replicated_arrays]
    not_data = owned.layer_variable_ids | {id(variable) for variable in others}
    used = {id(variable): variable for variable in code.trace.used if isinstance(variable, keras.Variable)}
    return [
        variable
        for i, variable in used.items()
        if i not in not_data
        and not variable.trainable
        and not random_keys.is_seed_state(variable)
        and len(variable.shape)
        and refused_calls.has_different_rows(get_raw_value(variable))
    ]


def make_suspicion(captures: list[Capture], replicas: int) -> Callable[[AnyArray], bool]:
    """Build a test: may an array come from a captured one?

    It is asked where a layer gets an array that is not computed from a replica's rows.
    """
    if replicas == 1:
        return lambda array: False
    if any(capture.holds_data and is_source_of_items(capture.value) for capture in captures):
        return lambda array: True
    captured = find_captured_arrays(captures)
    return lambda array: any(
        is_among_constants(source, [array])
        or can_come_from(np.asarray(array), np.asarray(source))
        or is_chosen_from(np.asarray(array), np.asarray(source))
        for _, source in captured
    )


def check_numpy_draws(code: InspectedCode) -> None:
    """Refuse numbers that NumPy draws for the rows of a replica.

    They are drawn once, when the code is traced, and stay the same.

    A second trace shows which arrays are drawn: it has other values in them.
    """
    arrays = find_row_arrays(code.trace, code.size) if code.replicas > 1 and code.trace_of is not None else []
    if not arrays or code.trace_of is None:
        return
    try:
        again = code.trace_of(code.size)
    except Exception:  # of code that can be traced only once; the trace of the step raises it
        return
    arrays_again = find_row_arrays(again.trace, code.size)
    for array, other in zip(arrays, arrays_again, strict=False):
        if array.shape == other.shape and not np.array_equal(array, other, equal_nan=array.dtype.kind == "f"):
            raise ValueError(
                f"Replica code makes an array of shape {array.shape} that is another one each time, as numpy.random does: it would be made "
                f"once, when the code is compiled, and be the same on all {code.replicas} replicas and in every step. Draw it with Keras, from a "
                f"generator that was made in the scope:\n\n"
                f"    with strategy.scope():\n        seeds = keras.random.SeedGenerator(0)\n\n"
                f"    keras.random.normal({array.shape}, seed=seeds)  # in replica code; also uniform, randint, shuffle\n\n"
                f"What is no random number and changes from step to step, pass as an argument."
            )


def find_row_arrays(trace: Trace, size: int) -> list[np.ndarray]:
    """Find the arrays of user code with the replica's number of rows. The code made or captured them when it was traced."""
    return [
        np.asarray(constant)
        for constant in find_user_constants(trace)
        if constant.shape[0] == size and refused_calls.has_different_rows(constant)
    ]
