"""Checks of a traced user function, before it is compiled, for what would silently train something else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import keras

from unisono._src.checks.user_code.captured_arrays import check_captured_iterators, check_leaked_tracers, find_captured_arrays
from unisono._src.checks.user_code.data_in_variables import check_data_in_variables
from unisono._src.checks.user_code.jaxpr import Atom, check_collectives
from unisono._src.checks.user_code.loss_scaling import is_near_number, list_products
from unisono._src.checks.user_code.numpy_draws import check_numpy_draws
from unisono._src.checks.user_code.provenance import NumberArgument, Provenance, RowSum
from unisono._src.checks.user_code.results import find_origins
from unisono._src.checks.user_code.undistributed_arrays import refuse_undistributed_arrays
from unisono._src.keras_private.trainer_state import get_raw_value
from unisono._src.ownership import OwnedObjects
from unisono._src.replica import refused_calls
from unisono._src.replica.variable_discovery import Trace
from unisono._src.typing import UserFunction


class InspectedStrategy(Protocol):
    """The part of a strategy that the inspection of its functions uses."""

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def owned(self) -> OwnedObjects: ...

    def check_variables(self, variables: list[keras.Variable], assigned: list[keras.Variable]) -> None: ...


def inspect_without_program(function: UserFunction, trace: Trace, strategy: InspectedStrategy) -> None:
    """Check what can be seen without a program: the variables that the function uses, and what it captures."""
    strategy.check_variables(trace.used, list(trace.code.scope.assigned.values()))
    check_leaked_tracers(function)
    check_captured_iterators(function)


def inspect_program(name: str, function: UserFunction, trace: Trace, strategy: InspectedStrategy, inputs: TraceInputs) -> None:
    """Check a function that was traced on these inputs."""
    inspect_without_program(function, trace, strategy)
    check_collectives(name, trace.program)
    check_mean_metrics(trace, strategy.num_replicas_in_sync, inputs)
    check_numpy_draws(trace, inputs.trace_of, inputs.size, strategy.num_replicas_in_sync)
    refuse_undistributed_arrays(function, trace, inputs.trace_of, inputs.has_rows, inputs.size, strategy.num_replicas_in_sync)
    check_data_in_variables(function, trace, inputs.trace_of, inputs.size, strategy.owned, strategy.num_replicas_in_sync)
    check_same_gradients(trace, strategy.num_replicas_in_sync)
    check_summed_gradients(trace, strategy.num_replicas_in_sync)


class TraceInputs(NamedTuple):
    """The inputs that a function was traced on."""

    rows: int
    """Rows of the global batch."""
    size: int
    """Rows of the replica."""
    shares: Sequence[int]
    """Positions, among the arrays of the batch, of shares of a loss that an earlier run returned."""
    has_rows: bool
    """Whether the function gets rows, or values that an earlier run made of rows."""
    trace_of: Callable[[int], Trace] | None
    """Traces the function on another number of rows; None where it cannot be traced on others."""


def find_shares(trace: Trace, inputs: TraceInputs) -> list[Atom]:
    """Return the variables of the program that are a replica's share of a loss."""
    return [
        *(share for _, share in trace.noted.get("share", [])),
        *(trace.program.jaxpr.invars[position] for position in inputs.shares),
    ]


def find_returned_shares(trace: Trace, inputs: TraceInputs) -> frozenset[int]:
    """Return the positions, among the arrays that the function returns, of shares of a loss."""
    sources = Provenance(trace.program, trace.arrays)
    shares = find_shares(trace, inputs)
    return frozenset(position for position, variable in enumerate(trace.returned) if sources.can_reach(variable, shares))


def check_mean_metrics(trace: Trace, replicas: int, inputs: TraceInputs) -> None:
    """Refuse mean metrics that are fed with a share of a loss, or with a sum that has one as a term. A single replica's share is the loss."""
    fed = trace.noted.get("fed", [])
    sources = Provenance(trace.program, trace.arrays)
    shares = find_shares(trace, inputs)
    for metric, value in fed if replicas > 1 else []:
        if sources.can_reach(value, shares) or any(is_share(mean, inputs) for mean in sources.means(value, shares)):
            refused_calls.refuse_mean_of_loss_part(metric, replicas)


def is_share(mean: RowSum, inputs: TraceInputs) -> bool:
    """Return whether code divides a sum over a replica's rows by the size of the global batch."""
    everything = mean.elements * inputs.rows / inputs.size
    numbers = list(
        list_products([divisor for divisor in (*mean.divisors, *mean.factors) if not isinstance(divisor, NumberArgument)])
    )
    return (
        inputs.rows > inputs.size
        and not any(is_near_number(divisor, mean.elements) for divisor in numbers)
        and any(is_near_number(divisor, everything) or is_near_number(divisor, inputs.rows) for divisor in numbers)
    )


def check_same_gradients(trace: Trace, replicas: int) -> None:
    """Refuse gradients in which nothing comes from a replica's rows: all replicas have the same, and they would be added up."""
    of_replica = {*range(trace.arrays), trace.replica_position}
    if replicas == 1 or trace.noted.keys() & {"loss", "vector"}:  # these are checked by their growth with the rows
        return
    for optimizer, results in trace.find_results("gradients"):
        if not find_origins(trace.program, results).arguments & of_replica:
            refused_calls.refuse_same_gradients(optimizer, replicas)


def check_summed_gradients(trace: Trace, replicas: int) -> None:
    """Refuse gradients that contain a sum over all replicas, left by earlier runs: it would be added up over replicas once more."""
    used = (
        [variable for variable in trace.used if isinstance(variable, keras.Variable) and variable.aggregation == "sum"]
        if replicas > 1
        else []
    )
    sums = {id(get_raw_value(variable)): variable for variable in used}
    outputs = trace.program.jaxpr.outvars
    for optimizer, results in trace.find_results("gradients") if sums else []:
        for result in results:
            contained = [
                sums[id(constant)] for constant in find_origins(trace.program, [result]).constants if id(constant) in sums
            ]
            for variable in contained:
                if tuple(variable.shape) == outputs[result].aval.shape:
                    refused_calls.refuse_summed_gradients(optimizer, variable, replicas)


@contextlib.contextmanager
def name_array_in_errors(function: UserFunction, replicas: int) -> Iterator[None]:
    """Add to an error about an array the name by which the function finds the array."""
    try:
        yield
    except refused_calls.UndistributedError as error:
        for name, array in find_captured_arrays(function):
            if array is error.array:
                refused_calls.refuse_undistributed(array, f"by the name {name!r}", replicas)
        raise
