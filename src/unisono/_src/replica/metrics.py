"""The contribution of a replica to the metrics.

Keras' metrics are sums: a replica starts from the reset state, and its changes are added to the state. The exception is a mean that is fed
with one number for a whole batch: its changes are weighted by the row fraction.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Iterable, Mapping, Sequence

import keras

from unisono._src.keras_private.compiled_losses import is_metric_of_keras
from unisono._src.keras_private.instances import wrap_averaged_function, wrap_method
from unisono._src.keras_private.trainer_state import list_scope_values
from unisono._src.replica.row_axes import RowAxes
from unisono._src.replica.row_coupling import OutputRows
from unisono._src.typing import Array, Logs, PyTree, UserFunction, Values, is_dict, is_plain_array


class BatchLevelMeans:
    """The means that are fed with one number for all rows of a replica. A trace of the replica shows them."""

    def __init__(self, metrics: Iterable[keras.metrics.Metric], by_rows: OutputRows, axes: RowAxes | None = None) -> None:
        """`axes` tells which values that code feeds by hand are values of rows."""
        self._by_rows = by_rows
        self._axes = axes or RowAxes()
        self._metrics = [metric for metric in metrics if isinstance(metric, keras.metrics.Mean)]
        self._batch_level: list[keras.metrics.Metric] = []

    @contextlib.contextmanager
    def watch(self) -> Generator[None]:
        """Note the means that are fed with one number in this block."""
        with contextlib.ExitStack() as stack:
            for metric in self._metrics:
                if isinstance(metric, keras.metrics.MeanMetricWrapper):
                    stack.enter_context(wrap_averaged_function(metric, functools.partial(self._wrap_function, metric)))
                elif type(metric) is keras.metrics.Mean:
                    stack.enter_context(wrap_method(metric, "update_state", functools.partial(self._wrap_update, metric)))
            yield

    def compute_changes(
        self,
        variables: Sequence[keras.Variable],
        probed: Mapping[int, bool],
        reset: Sequence[Array],
        after: Sequence[Array],
        row_fraction: Array,
    ) -> list[Array]:
        """Return the changes of the metrics' variables by a replica's rows.

        Args:
            variables: The variables of all metrics.
            probed: For the ids of variables of which a probe has told it, whether they are means of batches.
            reset: The values of the variables after a reset.
            after: Their values after the replica's code.
            row_fraction: The replica's row fraction.
        """
        means = {id(variable): True for metric in self._batch_level for variable in metric.variables} | dict(probed)
        return [
            (new - old) * row_fraction if means.get(id(variable)) else new - old
            for variable, new, old in zip(variables, after, reset, strict=True)
        ]

    def _wrap_function(self, metric: keras.metrics.MeanMetricWrapper, function: UserFunction) -> UserFunction:
        def call_and_note(*args: PyTree, **kwargs: PyTree) -> PyTree:
            with_options = functools.partial(function, **kwargs)
            if not self._by_rows(metric, with_options, *args):
                self._batch_level.append(metric)
            return self._by_rows.restore(function(*args, **kwargs), metric, with_options, *args)

        return call_and_note

    def _wrap_update(self, metric: keras.metrics.Mean, update_state: UserFunction) -> UserFunction:
        def update_and_note(values: PyTree, sample_weight: Array | None = None) -> object:
            rows = values if isinstance(values, keras.Variable) and values.shape else None
            if is_plain_array(values):
                rows = self._axes.find_rows(values)
            if sample_weight is None and rows is None:
                self._batch_level.append(metric)
            if rows is not None:
                values = rows
            return update_state(values, sample_weight=sample_weight)

        return update_and_note


def compute_reset_values(metrics: Iterable[keras.metrics.Metric], variables: Sequence[keras.Variable]) -> Values:
    """Return the values of the metrics' variables after a reset."""
    zeros = [(variable, keras.ops.zeros(variable.shape, variable.dtype)) for variable in variables]
    with keras.StatelessScope(state_mapping=zeros) as scope:
        for metric in metrics:
            metric.reset_state()
        return list_scope_values(scope, variables)


def flatten_logs(logs: Logs) -> Logs:
    """Return the logs as Keras' loops show them: without nesting, which `compile_metrics` makes.

    >>> flatten_logs({"loss": 1, "compile_metrics": {"mae": 2}})
    {'loss': 1, 'mae': 2}
    """
    flat: Logs = {}
    for name, value in logs.items():
        flat |= flatten_logs(value) if is_dict(value) else {name: value}
    return flat


def find_unproven_metrics(metrics: Iterable[keras.metrics.Metric]) -> list[keras.metrics.Metric]:
    """Return the metrics that may be no sums: the user's classes and functions, losses in the place of metrics, and the metrics of Keras that
    are fed by hand."""
    return [metric for metric in metrics if not is_metric_of_keras(metric) or type(metric) in UNPROVEN]


FED_BY_HAND = (keras.metrics.Mean, keras.metrics.Sum)
UNPROVEN = (*FED_BY_HAND, keras.metrics.MeanMetricWrapper)
"""Keras makes a MeanMetricWrapper of a loss in the place of a metric."""
