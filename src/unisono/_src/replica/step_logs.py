"""The logs of a step where they are not simply the results of the model's metrics.

Callbacks see the logs that the step returns after each batch. A log that is computed from the metrics' variables alone is computed once, from what
all replicas have added to them. The others are numbers of rows. Keras ends an epoch with the results of the metrics if the last logs have their
names, and else with the last logs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._src.inlining import inline_calls
from unisono._src.replica import optimizer_update
from unisono._src.replica.growth import Growth
from unisono._src.replica.metrics import flatten_logs
from unisono._src.replica.metrics_function import CutProgram, MetricsFunction
from unisono._src.typed_jax import make_jaxpr
from unisono._src.typing import Array, Logs

RunStep: TypeAlias = Callable[[list[Array]], tuple[list[Array], Logs]]
"""Runs a step on the rows of a replica from values of the metrics' variables; returns (their values after it, its logs)."""


class StepLogs:
    """The logs of a model's steps in one mode."""

    def __init__(self, model: keras.Model, growth: Growth, has_own_code: bool, has_one_replica: bool, eager: bool) -> None:
        """`has_own_code`: the user's code returns the logs. `eager`: steps are not compiled, and may do what a trace cannot follow."""
        self._model = model
        self._has_own_code = has_own_code
        self._growth = growth
        self._has_one_replica = has_one_replica
        self._eager = eager
        self.have_result_names = True
        """Whether the logs have the names of the metrics' results, so that an epoch ends with these."""
        self._functions: dict[str, MetricsFunction | str | None] = {}
        """For each log of a step how it is computed from the metrics: a function, or the name of a result; None for a number of rows."""
        self._names: list[str] | None = None
        """The logs that the step returned last; it may return others of other batches. None where the logs are the metrics' results."""

    def weigh_numbers(
        self, logs: Logs | None, weights: list[Array], after: list[Array], row_fraction: Array, run_step: RunStep
    ) -> dict[str, Array]:
        """Return the replica's contribution to the logs that are numbers of rows; `compute` returns the others.

        Args:
            logs: What the step has returned.
            weights: The values of the trainable variables.
            after: The values of the metrics' variables after the step.
            row_fraction: The replica's row fraction.
            run_step: Runs the step once more, in a trace.
        """
        flat = flatten_logs(logs or {})
        results = optimizer_update.compute_logs(self._model, weights, after)
        self.have_result_names = logs is None or flat.keys() == results.keys()
        if self.have_result_names and (logs is None or not self._has_own_code):
            self._names = None
            return {}
        if not flat.keys() <= self._functions.keys():
            try:
                self._functions = self._find_functions(after, run_step)
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                if not self._eager:
                    raise
                self._functions = find_equal_results(flat, results)
        self._names = list(flat)
        return {
            name: self._growth.weighted(f"the log {name!r}", keras.ops.cast(value, "float32"), row_fraction)
            for name, value in flat.items()
            if self._functions[name] is None
        }

    def compute(self, weights: list[Array], metric_values: list[Array]) -> Logs:
        """Return the logs that are computed from the metrics, from the values of their variables and of the trainable variables."""
        if self._names is None:
            return optimizer_update.compute_logs(self._model, weights, metric_values)
        logs: Logs = {}
        for name in self._names:
            function = self._functions[name]
            if isinstance(function, MetricsFunction):
                logs[name] = function(metric_values)
            elif function is not None:
                logs[name] = optimizer_update.compute_logs(self._model, weights, metric_values)[function]
        return logs

    def _find_functions(self, before: list[Array], run_step: RunStep) -> dict[str, MetricsFunction | str | None]:
        """Return how each log is computed, from the program of the step. Warn of logs that are made of metrics and of rows."""
        names: list[str] = []

        def run(values: list[Array]) -> tuple[list[Array], list[Array]]:
            after, logs = run_step(values)
            flat = flatten_logs(logs)
            names.extend(flat)
            return after, [jnp.asarray(value) for value in flat.values()]

        shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in before]
        cut = CutProgram(inline_calls(make_jaxpr(run)(shapes)), len(shapes))
        functions: dict[str, MetricsFunction | str | None] = {}
        for name, (function, is_mixed) in zip(names, map(cut.find_function, range(len(names))), strict=True):
            functions[name] = function
            if is_mixed and not self._has_one_replica:
                self._growth.note_warned(f"the log {name!r}")
                warnings.warn(describe_mixed(name), stacklevel=2)
        return functions


def find_equal_results(logs: Logs, results: Logs) -> dict[str, MetricsFunction | str | None]:
    """Return, for each log, its name if it has the value of the result of this name."""
    return {
        name: name if name in results and np.array_equal(value, results[name], equal_nan=True) else None
        for name, value in logs.items()
    }


def describe_mixed(name: str) -> str:
    return (
        f"The log {name!r} is made of metrics' variables and of something else, such as rows. A replica has in these variables only what its "
        f"own rows have added in this step. So the log is not that of the whole batch. Compute it in get_metrics_result(), which is called "
        f"with what all replicas have added, return the metrics and the number of rows as two logs, or write replicas=1."
    )
