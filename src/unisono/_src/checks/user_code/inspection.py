"""A traced function of the user's is looked at before it is compiled: for what would train something else in silence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from unisono._src import keras_private
from unisono._src.checks.user_code.captured_arrays import arrays_around, check_iterators, check_nothing_left
from unisono._src.checks.user_code.data_in_variables import check_variables
from unisono._src.checks.user_code.jaxpr import check_collectives
from unisono._src.checks.user_code.loss_scaling import is_close, products
from unisono._src.checks.user_code.numpy_draws import check_drawn
from unisono._src.checks.user_code.provenance import Argument, Mean, Sources
from unisono._src.checks.user_code.results import made_of
from unisono._src.checks.user_code.undistributed_arrays import check_arrays
from unisono._src.replica import refused_calls
from unisono._src.replica.variable_discovery import Trace


def inspect_used(function: Callable[..., Any], trace: Trace, strategy: Any) -> None:
    """Look at what can be seen without a program."""
    strategy.check_variables(trace.used, list(trace.code.scope.assigned.values()))
    check_nothing_left(function)
    check_iterators(function)


def inspect(name: str, function: Callable[..., Any], trace: Trace, strategy: Any, of: Received) -> None:
    inspect_used(function, trace, strategy)
    check_collectives(name, trace.program)
    check_means(trace, strategy.num_replicas_in_sync, of)
    check_drawn(trace, of.trace_of, of.size, strategy.num_replicas_in_sync)
    check_arrays(function, trace, of.trace_of, of.rows_are_given, of.size, strategy.num_replicas_in_sync)
    check_variables(function, trace, of.trace_of, of.size, strategy.owned, strategy.num_replicas_in_sync)
    check_gradients(trace, strategy.num_replicas_in_sync)
    check_sums(trace, strategy.num_replicas_in_sync)


class Received(NamedTuple):
    """What the function was traced with."""

    rows: int
    """Of the global batch."""
    size: int
    """Of a replica's."""
    shares: Sequence[int]
    """Positions, among the arrays of the batch, of shares of a loss that an earlier run returned."""
    rows_are_given: bool
    """Whether the function gets rows, or values that an earlier run made of some."""
    trace_of: Callable[[int], Trace] | None
    """Traces it on another number of rows; None where it cannot be."""


def shares_in(trace: Trace, of: Received) -> list[Any]:
    """The variables of the program that are a replica's share of a loss."""
    return [*(share for _, share in trace.noted.get("share", [])), *(trace.program.jaxpr.invars[i] for i in of.shares)]


def shares_among_returned(trace: Trace, of: Received) -> frozenset[int]:
    """Which of the arrays that the function returns are shares."""
    sources, shares = Sources(trace.program, trace.arrays), shares_in(trace, of)
    return frozenset(i for i, variable in enumerate(trace.returned) if sources.reaches(variable, shares))


def check_means(trace: Trace, replicas: int, of: Received) -> None:
    """Mean metrics must not be fed with shares of a loss, nor with sums of them and others. A single replica's share is the loss."""
    fed, sources = trace.noted.get("fed", []), Sources(trace.program, trace.arrays)
    shares = shares_in(trace, of)
    for metric, value in fed if replicas > 1 else []:
        if sources.reaches(value, shares) or any(is_share(mean, of) for mean in sources.means(value, shares)):
            refused_calls.refuse_share(metric, replicas)


def is_share(mean: Mean, of: Received) -> bool:
    """Whether code divides a sum over a replica's rows by what the global batch has."""
    everything = mean.elements * of.rows / of.size
    numbers = list(products([d for d in (*mean.divisors, *mean.factors) if not isinstance(d, Argument)]))
    return (
        of.rows > of.size
        and not any(is_close(d, mean.elements) for d in numbers)
        and any(is_close(d, everything) or is_close(d, of.rows) for d in numbers)
    )


def check_gradients(trace: Trace, replicas: int) -> None:
    """A gradient of which nothing comes from a replica's rows is the same on all, and would be added up."""
    own = {*range(trace.arrays), trace.number_of_replica}
    if replicas == 1 or trace.noted.keys() & {
        "loss",
        "vector",
    }:  # what is differentiated here is looked at by how it grows with rows
        return
    for optimizer, results in trace.results_of("gradients"):
        if not made_of(trace.program, results).arguments & own:
            refused_calls.refuse_same_gradients(optimizer, replicas)


def check_sums(trace: Trace, replicas: int) -> None:
    """A gradient in which the sum of all replicas stands, as earlier runs have left it, is added up over replicas once more."""
    used = [v for v in trace.used if isinstance(v, keras.Variable) and v.aggregation == "sum"] if replicas > 1 else []
    sums = {id(keras_private.raw_value(v)): v for v in used}
    outputs = trace.program.jaxpr.outvars
    for optimizer, results in trace.results_of("gradients") if sums else []:
        for result in results:
            among = [sums[id(a)] for a in made_of(trace.program, [result]).constants if id(a) in sums]
            for variable in among:
                if tuple(variable.shape) == outputs[result].aval.shape:
                    refused_calls.refuse_summed_gradients(optimizer, variable, replicas)


@contextlib.contextmanager
def naming(function: Callable[..., Any], replicas: int) -> Iterator[None]:
    """An error about an array says by what name the function finds it."""
    try:
        yield
    except refused_calls.UndistributedError as error:
        for name, array in arrays_around(function):
            if array is error.array:
                refused_calls.refuse_undistributed(array, f"by the name {name!r}", replicas)
        raise
