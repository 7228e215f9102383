"""What a replica's rows add to the metrics.

Keras' metrics are sums: a replica starts from the reset state, and what it adds is added to the state. Not a sum is a mean
that is fed with one number for a whole batch: what it adds is weighted by the replica's share of the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from unisono import keras_seam
from unisono.placement import split_evenly
from unisono.replica.rows import by_rows

CLOSE = 1e-3
"""Two sums of the same few rows differ by rounding alone; what is no sum differs by much more."""


class BatchLevelMeans:
    """Finds, while a replica is traced, the means that are fed with one number for all of its rows."""

    def __init__(self, metrics: Iterable[Any]) -> None:
        self._metrics = [m for m in metrics if isinstance(m, keras.metrics.Mean)]
        self._found: list[Any] = []

    @contextlib.contextmanager
    def watch(self) -> Any:
        with contextlib.ExitStack() as stack:
            for metric in self._metrics:
                if isinstance(metric, keras.metrics.MeanMetricWrapper):
                    stack.enter_context(keras_seam.wrapped_function(metric, self._values_of(metric)))
                elif type(metric) is keras.metrics.Mean:
                    stack.enter_context(keras_seam.wrapped_method(metric, "update_state", self._update_of(metric)))
            yield

    def variables(self) -> set[int]:
        return {id(variable) for metric in self._found for variable in metric.variables}

    def _values_of(self, metric: Any) -> Callable[[Any], Any]:
        def wrap(function: Any) -> Any:
            def noted(*args: Any, **kwargs: Any) -> Any:
                if not by_rows(lambda *args: function(*args, **kwargs), *args):
                    self._found.append(metric)
                return function(*args, **kwargs)

            return noted

        return wrap

    def _update_of(self, metric: Any) -> Callable[[Any], Any]:
        def wrap(update_state: Any) -> Any:
            def noted(values: Any, sample_weight: Any = None) -> Any:
                if sample_weight is None and not getattr(values, "shape", ()):
                    self._found.append(metric)
                return update_state(values, sample_weight=sample_weight)

            return noted

        return wrap


def reset_values(metrics: Iterable[Any], variables: list[Any]) -> list[Any]:
    """The values that the metrics' variables have after a reset."""
    with keras.StatelessScope(state_mapping=[(v, keras.ops.zeros(v.shape, v.dtype)) for v in variables]) as scope:
        for metric in metrics:
            metric.reset_state()
        return [scope.get_current_value(v) for v in variables]


def added(variables: list[Any], by_share: dict[int, bool], reset: list[Any], after: list[Any], share: Any) -> list[Any]:
    """What a replica's rows add to the metrics' variables; `by_share` says, by ids, which are means of batches."""
    return [
        (new - old) * share if by_share.get(id(variable)) else new - old
        for variable, new, old in zip(variables, after, reset, strict=True)
    ]


def some_rows(batch: Any) -> tuple[int, Any]:
    """(how many, a batch of so many rows) to look at; parts are needed, so that one row is taken several times."""
    rows = min(jax.tree.leaves(batch)[0].shape[0], 8)
    return (rows, batch) if rows > 1 else (4, jax.tree.map(lambda a: np.repeat(a, 4, axis=0), batch))


@contextlib.contextmanager
def noted(metrics: Iterable[Any], note: Callable[[str, Any, Any], Any]) -> Iterator[None]:
    """For the block, the arrays that the metrics are fed with are noted, as an "update" of (metric, what makes its arguments again)."""

    def noting(metric: Any) -> Callable[[Any], Any]:
        def wrap(update_state: Any) -> Any:
            def update(*args: Any, **kwargs: Any) -> Any:
                leaves, structure = jax.tree.flatten((args, kwargs))
                arrays = [leaf if hasattr(leaf, "dtype") else None for leaf in leaves]

                def filled(arrays: list[Any]) -> Any:
                    return jax.tree.unflatten(
                        structure, [leaf if a is None else a for a, leaf in zip(arrays, leaves, strict=True)]
                    )

                note("update", arrays, (metric, filled))
                return update_state(*args, **kwargs)

            return update

        return wrap

    with contextlib.ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(keras_seam.wrapped_method(metric, "update_state", noting(metric)))
        yield


def unpromised(metrics: Iterable[Any]) -> list[Any]:
    """The metrics of which nobody has promised that they are sums: the user's classes and functions, and those of Keras that
    are fed by hand."""
    return [m for m in metrics if not keras_seam.is_of_keras(m) or type(m) in FED_BY_HAND]


FED_BY_HAND = (keras.metrics.Mean, keras.metrics.Sum)


def weighted_by_share(
    metrics: Iterable[Any],
    variables: list[Any],
    reset: list[Any],
    updated: Callable[[list[Any], range], list[Any]],
    rows: int,
) -> dict[int, bool]:
    """Looks once how metrics of the user's own are merged: whether the parts of some rows, each from the reset state and all
    one after another, add up to what the whole gives, or whether their means do, weighted by rows.

    Args:
        metrics: The metrics.
        variables: Their variables.
        reset: The values of these after a reset.
        updated: `updated(state, rows)` is the metrics' state after some rows out of the first `rows`.
        rows: How many rows there are to look at.

    Returns:
        For the ids of variables that could be decided: whether they are means of batches, to be weighted by the replica's
        share of the rows, and not sums.

    Raises:
        ValueError: For a metric that is neither.
    """
    position, cut = {id(v): index for index, v in enumerate(variables)}, split_evenly(rows, min(rows, 4))
    shares = [len(part) / rows for part in cut]

    def added(state: list[Any]) -> list[np.ndarray]:
        return [np.asarray(new, "float64") - np.asarray(old, "float64") for new, old in zip(state, reset, strict=True)]

    whole, parts, in_turn = added(updated(reset, range(rows))), [added(updated(reset, part)) for part in cut], reset
    for part in cut:
        in_turn = updated(in_turn, part)
    in_turn, decided = added(in_turn), {}
    for metric in unpromised(metrics):
        mine = [position[id(v)] for v in metric.variables]
        sums = {i: sum(part[i] for part in parts) for i in mine}
        means = {i: sum(s * part[i] for s, part in zip(shares, parts, strict=True)) for i in mine}
        neither = [
            i for i in mine if not close(in_turn[i], sums[i]) or not (close(whole[i], sums[i]) or close(whole[i], means[i]))
        ]
        if not neither:
            if any(np.any(whole[i]) for i in mine):  # else nothing was seen
                decided |= {id(v): not close(whole[position[id(v)]], sums[position[id(v)]]) for v in metric.variables}
        elif not isinstance(metric, keras.metrics.Mean) or not keras_seam.is_class_of_keras(metric):
            worst = neither[0]  # a mean of what a function says of a whole batch may be anything, in Keras too
            raise ValueError(
                f"The metric {metric.name!r} ({type(metric).__name__}) cannot be merged over replicas: parts of a batch add "
                f"{', '.join(str(part[worst]) for part in parts)} to its variable {variables[worst].path!r}, one after "
                f"another {in_turn[worst]}, and the whole batch {whole[worst]}. Its state must be made of sums over rows, as "
                f"keras.metrics.Mean keeps a total and a count. Rewrite its update_state with assign_add of sums, or write replicas=1."
            )
    return decided


def close(a: Any, b: Any) -> bool:
    return bool(np.allclose(a, b, rtol=CLOSE, atol=CLOSE * (1e-6 + float(np.max(np.abs(b), initial=0.0)))))
