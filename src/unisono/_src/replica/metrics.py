"""What a replica's rows add to the metrics.

Keras' metrics are sums: a replica starts from the reset state, and what it adds is added to the state. Not a sum is a mean
that is fed with one number for a whole batch: what it adds is weighted by the replica's share of the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import keras

from unisono._src import keras_private
from unisono._src.replica.output_rows import ByRows


class BatchLevelMeans:
    """Finds, while a replica is traced, the means that are fed with one number for all of its rows."""

    def __init__(self, metrics: Iterable[Any], by_rows: ByRows) -> None:
        self._by_rows = by_rows
        self._metrics = [m for m in metrics if isinstance(m, keras.metrics.Mean)]
        self._found: list[Any] = []

    @contextlib.contextmanager
    def watch(self) -> Any:
        with contextlib.ExitStack() as stack:
            for metric in self._metrics:
                if isinstance(metric, keras.metrics.MeanMetricWrapper):
                    stack.enter_context(keras_private.wrapped_function(metric, self._values_of(metric)))
                elif type(metric) is keras.metrics.Mean:
                    stack.enter_context(keras_private.wrapped_method(metric, "update_state", self._update_of(metric)))
            yield

    def variables(self) -> set[int]:
        return {id(variable) for metric in self._found for variable in metric.variables}

    def _values_of(self, metric: Any) -> Callable[[Any], Any]:
        def wrap(function: Any) -> Any:
            def noted(*args: Any, **kwargs: Any) -> Any:
                if not self._by_rows(metric, lambda *args: function(*args, **kwargs), *args):
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


def flattened(logs: dict[str, Any]) -> dict[str, Any]:
    """Return the logs as Keras' loops show them: those of a metric of several, as `compile_metrics` is, stand beside the others.

    >>> flattened({"loss": 1, "compile_metrics": {"mae": 2}})
    {'loss': 1, 'mae': 2}
    """
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found |= flattened(value) if isinstance(value, dict) else {name: value}
    return found


def unpromised(metrics: Iterable[Any]) -> list[Any]:
    """The metrics of which nobody has promised that they are sums: the user's classes and functions, and those of Keras that
    are fed by hand."""
    return [m for m in metrics if not keras_private.is_of_keras(m) or type(m) in FED_BY_HAND]


FED_BY_HAND = (keras.metrics.Mean, keras.metrics.Sum)
