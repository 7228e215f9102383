"""The probe of a user function: runs on some rows, on others and on both show how metrics are merged, and whether gradients add up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._src.keras_private.evaluation import call_as_in_evaluation, have_coarse_layers
from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.optimizers import list_optimizer_weights
from unisono._src.replica import metrics, overwritten
from unisono._src.replica.fed_means import find_batch_level_means
from unisono._src.replica.fixed_draws import SteadyFunction
from unisono._src.replica.gradient_changes import find_gradient_fault, warn_of_gradients
from unisono._src.replica.growth import EXACT, GRADIENT_SLACK, HALF
from unisono._src.replica.metric_probe import MetricDecisions
from unisono._src.replica.metric_updates import MetricUpdate, UpdatesOnOtherRows, note_updates
from unisono._src.replica.mismatches import Mismatches
from unisono._src.replica.probe_rows import RowPair, make_up_rows, pair_shards
from unisono._src.replica.protocol import State
from unisono._src.replica.row_axes import RowAxes
from unisono._src.replica.trace_recorder import ReplicaCode
from unisono._src.replica.used_variables import UsedVariables
from unisono._src.typing import Array, PyTree, Shape, UserObject

MOST_DIVISORS = 64
MOST_PAIRS = 2
"""Pairs of replicas' rows that are measured in one probe."""
MOST_OF_GRADIENTS = 4
"""Pairs of any rows on which gradients are measured. Each measurement is as large as the weights."""


class ProbedFunction(Protocol):
    """A user function, as its probe runs it."""

    variables: UsedVariables
    call: Callable[[PyTree, Sequence[Array]], PyTree]

    def start_values(self, state: State, replica: Array) -> State: ...

    def find_axes(self, state: State, batch: PyTree, constants: Sequence[Array]) -> RowAxes: ...

    def make_means(self, axes: RowAxes) -> metrics.BatchLevelMeans: ...

    def run(
        self,
        values: State,
        batch: PyTree,
        replica: Array,
        row_fraction: Array,
        divisors: Array | None,
        axes: RowAxes,
    ) -> AbstractContextManager[ReplicaCode]: ...


class FunctionProbe:
    """A probe of one user function on global batches."""

    def __init__(
        self,
        functions: ProbedFunction,
        name: str,
        replicas: int,
        layers: Callable[[], Sequence[keras.Layer]],
        eager: bool,
    ) -> None:
        """`layers` returns the layers that the function may call."""
        self._functions = functions
        self._name = name
        self._replicas = replicas
        self._find_layers = layers
        self._eager = eager
        self._metrics = metrics.find_unproven_metrics(functions.variables.metrics)
        self._mismatches = Mismatches()
        self._decisions = MetricDecisions(self._metrics, self._mismatches)
        self._effects = SteadyFunction(self._compute_effects, eager)
        self._metric_calls: dict[tuple[Shape, ...], list[UserObject]] = {}
        """For rows of each shape, the calls that feed metrics, in turn: (metric, how its arguments are filled)."""
        self.changes_gradients = False
        """Whether the code applies other gradients than `value_and_grad` gave."""
        self.is_said = False
        """Whether the user was told that the applied gradients are not those of one batch."""
        self.is_undecided = False
        """Whether it is open how a metric is merged."""
        self.count = 0
        """How many batches were probed."""

    @property
    def batch_means(self) -> dict[int, bool]:
        """Return, for the ids of metrics' variables that are decided, whether they are means of batches."""
        return self._decisions.batch_means

    def at(self, state: State, batch: PyTree, shards: Sequence[range], constants: Sequence[Array]) -> bool:
        """Probe a global batch on the host, and return whether metrics are now merged in another way."""
        measures_gradients = self._measures_gradients
        if not (self._metrics or measures_gradients):
            return False
        before = self.batch_means
        with call_as_in_evaluation(*self._find_layers()):
            pairs = pair_shards(state, batch, shards, most=MOST_PAIRS)
            if not (self.count or self._eager):
                self._observe(state, pairs[0].one, 1, constants)  # from here on it is known what its program compares
                pairs += [RowPair.of(state, rows) for rows in make_up_rows(pairs[0].both, self._effects.compared_values)]
            if self._metrics:
                self._probe_metrics(pairs, constants)
                self._mismatches.tell()
            if measures_gradients:
                self._probe_gradients(pairs[:MOST_OF_GRADIENTS], constants)
        self.count += 1
        return self.batch_means != before

    @property
    def _measures_gradients(self) -> bool:
        """Return whether gradients are to be measured: once, and not in eager code, whose random draws cannot be fixed."""
        return self.changes_gradients and not (self.is_said or self.count or self._eager)

    def _probe_metrics(self, pairs: Sequence[RowPair], constants: Sequence[Array]) -> None:
        """Measure until it is decided how each metric that is fed is merged."""
        variables = self._functions.variables.metric_variables
        reset = metrics.compute_reset_values(self._functions.variables.metrics, variables)
        for pair in pairs:
            updates = self._observe(pair.state, pair.one, 1, constants).updates
            other = self._observe_other_rows(pair, constants)
            rows = len(jax.tree.leaves(pair.one)[0])
            by_hand = self._divides_by(rows, self._replicas)
            means, are_telling = find_batch_level_means(updates, rows, other, self.batch_means, by_hand)
            self._decisions.decide(variables, reset, updates, rows, other, self._tolerance, means)
            self.is_undecided = other is not None and self._decisions.are_open
            if are_telling and not self.is_undecided:
                return

    def _probe_gradients(self, pairs: Sequence[RowPair], constants: Sequence[Array]) -> None:
        """Warn once of gradients that the code has made or changed, and that do not add up."""
        observed = list(self._observe_gradients(pairs, constants))
        fault = find_gradient_fault(observed, self._replicas, self._effects.factors, GRADIENT_SLACK * self._tolerance)
        if fault is not None:
            self.is_said = True
            warn_of_gradients(self._name, fault, self._replicas)

    def _divides_by(self, *sizes: int) -> bool:
        """Return whether the code divides or multiplies by one of these sizes, which makes a mean of a sum."""
        numbers = [number for size in sizes for number in (size, 1 / size) if size > 1]
        return any(math.isclose(factor, number, rel_tol=EXACT) for factor in self._effects.factors for number in numbers)

    @property
    def _tolerance(self) -> float:
        return HALF if have_coarse_layers(self._find_layers()) else EXACT

    def _observe_other_rows(self, pair: RowPair, constants: Sequence[Array]) -> UpdatesOnOtherRows | None:
        """Return the metric updates of the code on other rows; None where the code cannot run on more rows than a replica has."""
        if self._eager:  # eager code may draw random numbers that cannot be fixed
            return None
        other_updates = self._observe(pair.state, pair.other, 1, constants).updates
        try:
            return UpdatesOnOtherRows(other_updates, self._observe(pair.state, pair.both, 2, constants).updates)
        except Exception:  # of the user's code, which has just run on a replica's rows, and was not written for more
            return None

    def _observe_gradients(
        self, pairs: Sequence[RowPair], constants: Sequence[Array]
    ) -> Iterator[tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]]:
        """Return the gradients that the code applies on each pair; none where the code cannot run on more rows than a replica has."""
        # Of the user's code, as above, or of a callback in it that refuses made-up values. What raises on the rows of replicas, raises in
        # the step.
        with contextlib.suppress(Exception):
            for pair in pairs:
                observed = (self._observe(pair.state, rows, times, constants).gradients for rows, times in pair.batches)
                one, other, both = ([np.asarray(gradient) for gradient in gradients] for gradients in observed)
                yield one, other, both

    def _observe(self, state: State, rows: PyTree, times: int, constants: Sequence[Array]) -> Effects:
        """Return the effects of the code on these rows, which are `times` times the rows of a replica."""
        rows = jax.tree.map(jnp.asarray, rows)
        arrays_of_updates, gradients = self._effects(state, rows, jnp.float32(times), constants)
        calls = self._metric_calls[list_row_shapes(rows)]
        updates = [MetricUpdate(call[0], arrays, call[1]) for arrays, call in zip(arrays_of_updates, calls, strict=True)]
        return Effects(updates, gradients)

    def _compute_effects(
        self, state: State, rows: PyTree, row_fraction: Array, constants: Sequence[Array]
    ) -> tuple[list[list[Array | None]], list[Array]]:
        """Return (the arrays of each metric update, the gradients that the code applies), and note the metric calls of these rows."""
        start = self._functions.start_values(state, jnp.int32(0))
        axes = self._functions.find_axes(state, rows, constants)
        with (
            self._functions.run(start, rows, jnp.int32(0), row_fraction, jnp.ones(MOST_DIVISORS), axes) as code,
            note_updates(self._metrics, code.note),
            self._functions.make_means(axes).watch(),
            hide_masks(),
        ):
            self._functions.call(rows, constants)
        updates = [noted for noted in code.noted if noted.kind == "update"]
        self._metric_calls[list_row_shapes(rows)] = [noted.origin for noted in updates]
        gradients = [
            gradient.astype(jnp.float32)
            for update in code.updates
            for variable in list_optimizer_weights(update.optimizer)
            if self._measures_gradients and not overwritten.is_overwritten_by_gradient(variable)
            if (gradient := update.gradients.get(id(variable))) is not None and jnp.issubdtype(gradient.dtype, jnp.floating)
        ]
        return [noted.arrays for noted in updates], gradients


class Effects(NamedTuple):
    """The effects of code on some rows: the metric updates, and the gradients that it applies."""

    updates: list[MetricUpdate]
    gradients: list[Array]


def list_row_shapes(rows: PyTree) -> tuple[Shape, ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves(rows))
