"""What a replica's rows add to the metrics.

Keras' metrics are sums: a replica starts from the reset state, and what it adds is added to the state. Not a sum is a mean
that is fed with one number for a whole batch: what it adds is weighted by the replica's share of the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from unisono import keras_seam


class BatchLevelMeans:
    """Finds, while a replica is traced, the means that are fed with one number for all of its rows."""

    def __init__(self, model: Any, rows: int) -> None:
        self._metrics = [m for m in keras_seam.leaf_metrics(model) if isinstance(m, keras.metrics.Mean)]
        self._rows = rows
        self._found: list[Any] = []

    @contextlib.contextmanager
    def watch(self) -> Any:
        with contextlib.ExitStack() as stack:
            for metric in self._metrics:
                if isinstance(metric, keras.metrics.MeanMetricWrapper):
                    stack.enter_context(keras_seam.wrapped_method(metric, "_fn", self._values_of(metric)))
                elif type(metric) is keras.metrics.Mean:
                    stack.enter_context(keras_seam.wrapped_method(metric, "update_state", self._update_of(metric)))
            yield

    def variables(self) -> set[int]:
        return {id(variable) for metric in self._found for variable in metric.variables}

    def _note(self, metric: Any, values: Any) -> None:
        shape = tuple(getattr(values, "shape", ()))
        if not shape or shape[0] != self._rows:
            self._found.append(metric)

    def _values_of(self, metric: Any) -> Callable[[Any], Any]:
        def wrap(function: Any) -> Any:
            def noted(*args: Any, **kwargs: Any) -> Any:
                values = function(*args, **kwargs)
                self._note(metric, values)
                return values

            return noted

        return wrap

    def _update_of(self, metric: Any) -> Callable[[Any], Any]:
        def wrap(update_state: Any) -> Any:
            def noted(values: Any, sample_weight: Any = None) -> Any:
                if sample_weight is None:
                    self._note(metric, values)
                return update_state(values, sample_weight=sample_weight)

            return noted

        return wrap


def reset_values(model: Any) -> list[Any]:
    """The values that the metrics' variables have after a reset."""
    variables = model.metrics_variables
    with keras.StatelessScope(state_mapping=[(v, keras.ops.zeros(v.shape, v.dtype)) for v in variables]) as scope:
        model.reset_metrics()
        return [scope.get_current_value(v) for v in variables]
