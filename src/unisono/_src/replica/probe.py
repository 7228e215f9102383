"""The probe of a step: runs on some rows, on others and on both together show how its numbers and metrics are merged over replicas.

A later batch may tell what a first batch does not. So the probe is repeated, on the rows of the next training batch, until everything is
decided, and now and then after that.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._src.keras_private.evaluation import call_as_in_evaluation, have_coarse_layers
from unisono._src.replica import random_keys
from unisono._src.replica.added_state import AddedState
from unisono._src.replica.contribution import Contribution
from unisono._src.replica.fixed_draws import SteadyFunction
from unisono._src.replica.growth import (
    APPLIED_GRADIENTS,
    ENOUGH_ROWS,
    ENOUGH_ROWS_FOR_GRADIENTS,
    EXACT,
    HALF,
    ROUGH,
    Arrays,
    Growth,
    Measurement,
)
from unisono._src.replica.metric_probe import MetricDecisions
from unisono._src.replica.metric_updates import ArgumentFiller, FedArrays, MetricUpdate, UpdatesOnOtherRows, note_updates
from unisono._src.replica.probe_rows import (
    MOST_PAIRS,
    RowPair,
    change_seeds,
    draw_sample_weights,
    make_up_rows,
    pair_shards,
    perturb_weights,
    repeat_rows,
    slice_rows,
)
from unisono._src.replica.protocol import ReplicaComputation, State
from unisono._src.typing import Array, KerasObject, PyTree

PairUpdates: TypeAlias = tuple[list[MetricUpdate], UpdatesOnOtherRows]
"""The metric updates on one part of a pair, and those on the other part and on both."""


class ProbedFunctions(ReplicaComputation, Protocol):
    """The functions of the replicas of a compiled model, as its probe runs them."""

    model: KerasObject
    eager: bool
    """Whether the functions are called with arrays, not compiled."""
    growth: Growth
    """The growth of losses that are one number for all rows. The probe finds it."""
    has_user_step: bool
    """Whether the model's class overrides the step."""

    def gradients_of_numbers(self, state: State, batch: PyTree, row_fraction: Array, divisors: Array | None) -> dict[str, Array]:
        """Return the gradient of each loss that is one number for all rows, as one vector."""
        ...

    def list_own_changes(self, contribution: Contribution, batch: PyTree) -> list[tuple[keras.Variable, Array]]:
        """Return the changes of the state of the user's own layers that replicas average, or on which they must agree."""
        ...


class ModelProbe:
    """A probe of one replica's functions on global batches."""

    def __init__(self, functions: ProbedFunctions, metrics: Sequence[keras.metrics.Metric]) -> None:
        """`metrics` are the metrics that may be no sums."""
        self._functions = functions
        self._growth = functions.growth
        self._metrics = metrics
        self._model = functions.model
        self._is_coarse = have_coarse_layers([self._model])
        self._numbers: dict[str, Arrays] = {}
        """The numbers of the last run."""
        self._updates: dict[int, MetricUpdate] = {}
        """The metric updates of the last run, by the numbers of their calls."""
        self._calls: dict[int, tuple[keras.metrics.Metric, ArgumentFiller]] = {}
        """The calls of metrics in all traces, by their numbers."""
        self._call_numbers = itertools.count()
        self._step = SteadyFunction(self._contribute, functions.eager)
        self._step_version = self._growth.trace_version
        self._gradients = SteadyFunction(functions.gradients_of_numbers, functions.eager)
        self._divisors = SteadyFunction(self._divisor_array, functions.eager)
        self._probes = 0
        """How many batches were probed."""
        self._is_random: bool | None = None
        """Whether the step draws random numbers that cannot be held still; None before it was tried."""
        self._decisions = MetricDecisions(metrics, self._growth.mismatches)
        self._added_state = AddedState(self._growth.mismatches)
        self._own_state: dict[str, keras.Variable] = {}
        """The variables of the user's own layers that a step changes, by their paths."""

    @property
    def batch_means(self) -> dict[int, bool]:
        """Return, for the ids of metrics' variables that are decided, whether they are means of batches."""
        return self._decisions.batch_means

    @property
    def is_undecided(self) -> bool:
        """Return whether the kind of a number or a metric is still open."""
        return bool(self._decisions.are_open or self._growth.undecided_numbers)

    def at(self, state: State, batch: PyTree, shards: Sequence[range], reset: Sequence[Array]) -> None:
        """Probe a global batch on the host. Then `growth` and `batch_means` tell how numbers and metrics are merged.

        `shards` are the rows of each replica that has some, `reset` the values of the metrics' variables after a reset.
        """
        with call_as_in_evaluation(self._model):  # each row for itself: no dropout, no statistics of all rows
            first = slice_rows(batch, shards[0])
            totals = self._divisors(state, first)
            if self._is_random is None:
                self._run(state, first, 1, totals)  # this trace finds the numbers that the program compares rows with
                self._is_random = self._is_changed_by_seeds(state, first, totals)
            times = 1
            if self._is_random:
                has_gradients = APPLIED_GRADIENTS in self._growth.number_names
                times = -(-(ENOUGH_ROWS_FOR_GRADIENTS if has_gradients else ENOUGH_ROWS) // len(shards[0]))
                totals = totals * times
            pairs = self._choose_pairs(state, batch, shards, times)
            updates = self._decide_numbers(pairs, totals)
            if self._growth.undecided_numbers and not self._probes:  # for example, after a kernel that begins with zeros
                moved = perturb_weights(state)
                pairs = [*pairs, *(pair._replace(state=moved) for pair in pairs[-2:])]
                updates = self._decide_numbers(pairs, totals)
            if not (self._is_random or self._probes):
                self._compare_gradients(pairs[:: max(1, len(pairs) - 1)], totals)  # the first and the last
            self._decide_metrics(updates, len(shards[0]) * times, reset)
        self._growth.mismatches.tell()
        self._probes += 1
        self._numbers.clear()
        self._updates.clear()

    def _choose_pairs(self, state: State, batch: PyTree, shards: Sequence[range], times: int) -> list[RowPair]:
        """Return pairs of neighbouring replicas' rows, and made-up pairs; after the first probe, one pair. Where a step draws random numbers, it
        is one shard paired with itself: two runs with different rows cannot be compared."""
        if self._is_random:
            first = repeat_rows(slice_rows(batch, shards[0]), times)
            return [RowPair(state, first, first)]
        if self._probes or self._functions.eager:  # while a kind is open, all rows are probed, since some of them may tell
            return pair_shards(state, batch, shards, first=self._probes, most=MOST_PAIRS if self.is_undecided else 1)
        most = 2 if APPLIED_GRADIENTS in self._growth.number_names else MOST_PAIRS  # gradients are as large as the model
        real = pair_shards(state, batch, shards, most=most)
        both = real[0].both
        made = make_up_rows(both, self._step.compared_values)
        if not self._functions.has_user_step:  # a user step defines the structure of its batches
            made += draw_sample_weights(both)
        return [*real, *(RowPair.of(state, rows) for rows in made)]

    def _is_changed_by_seeds(self, state: State, rows: PyTree, totals: Array) -> bool:
        """Return whether other seeds give other numbers."""
        variables = self._model.non_trainable_variables
        if not any(random_keys.is_seed_state(variable) for variable in variables):
            return False
        runs = [self._run(start, rows, 1, totals) for start in (state, change_seeds(state, variables))]
        pairs = zip(
            *(jax.tree.leaves((numbers, [update.arrays for update in updates])) for numbers, updates in runs), strict=True
        )
        return not all(np.array_equal(*(np.asarray(array, "float64") for array in pair), equal_nan=True) for pair in pairs)

    def _decide_numbers(self, pairs: Sequence[RowPair], totals: Array) -> list[PairUpdates]:
        """Decide how numbers grow, and return the metric updates on each pair. Numbers that are made of others are measured again if these turn
        out to be sums."""
        while True:
            evidence: dict[str, list[Measurement]] = {}
            updates: list[PairUpdates] = []
            for pair in pairs:
                runs = [self._run(pair.state, rows, times, totals) for rows, times in pair.batches]
                (one, updates_of_one), (other, updates_of_other), (both, updates_of_both) = runs
                for what in one:
                    if what in other and what in both:
                        evidence.setdefault(what, []).append(Measurement.of(one[what], other[what], both[what]))
                updates.append((updates_of_one, UpdatesOnOtherRows(updates_of_other, updates_of_both)))
            for path in [path for path in self._own_state if path in evidence]:
                self._added_state.check(self._own_state[path], evidence.pop(path), self._tolerance)
            if not self._growth.decide_kinds(evidence, self._tolerance):
                return updates

    def _compare_gradients(self, pairs: Sequence[RowPair], totals: Array) -> None:
        """Warn where gradients tell more than numbers: replicas' gradients do not add up to the gradients of the whole batch."""
        slopes: dict[str, list[Measurement]] = {}
        for pair in pairs:
            gradients = [self._gradients(pair.state, rows, jnp.float32(times), totals) for rows, times in pair.batches]
            for what in gradients[0]:
                slopes.setdefault(what, []).append(Measurement.of(*([np.asarray(by_name[what])] for by_name in gradients)))
        self._growth.compare_gradients(slopes, self._tolerance)

    def _decide_metrics(self, updates: Sequence[PairUpdates], rows: int, reset: Sequence[Array]) -> None:
        """Decide how metrics are merged. Stop at the pair where no metric that is fed is left open."""
        for one, others in updates:
            self._decisions.decide(self._model.metrics_variables, reset, one, rows, others, self._tolerance)
            if not self._decisions.are_open:
                return

    @property
    def _tolerance(self) -> float:
        return ROUGH if self._is_random else HALF if self._is_coarse else EXACT

    def _divisor_array(self, state: State, rows: PyTree) -> Array:
        divisors = self._functions.divisors(state, rows, jnp.int32(0), jnp.float32(1), ())
        return jnp.array([0 if divisor is None else divisor for divisor in divisors], jnp.float32)

    def _contribute(self, state: State, rows: PyTree, row_fraction: Array, totals: Array) -> None:
        with self._growth.listen(self._note_number), note_updates(self._metrics, self._note_update):
            contribution, _ = self._functions.contribution(state, rows, jnp.int32(0), row_fraction, totals, ())
        for variable, change in self._functions.list_own_changes(contribution, rows):
            self._own_state[variable.path] = variable
            self._note_number(variable.path, [change])

    def _note_number(self, what: str, arrays: list[Array]) -> None:
        """Keep a number when the traced code runs. A callback takes it out of any trace, also inside of a gradient."""
        me = weakref.ref(self)  # JAX keeps what it has traced, with its callbacks, longer than a model lives

        def receive(values: Arrays) -> None:
            if probe := me():
                probe._numbers[what] = list(map(np.asarray, values))

        jax.debug.callback(receive, arrays)

    def _note_update(self, _: str, arrays: FedArrays, call: tuple[keras.metrics.Metric, ArgumentFiller]) -> None:
        number = next(self._call_numbers)
        self._calls[number] = call
        me = weakref.ref(self)

        def receive(values: FedArrays) -> None:
            if probe := me():
                metric, fill_arguments = probe._calls[number]
                probe._updates[number] = MetricUpdate(metric, jax.tree.map(np.asarray, values), fill_arguments)

        jax.debug.callback(receive, arrays)

    def _run(self, state: State, rows: PyTree, times: int, totals: Array) -> tuple[dict[str, Arrays], list[MetricUpdate]]:
        """Run the step on these rows, which are `times` as many as a replica has. Return its numbers and its metric updates."""
        if self._step_version != self._growth.trace_version:  # it is traced anew when more is known of its numbers
            self._step = SteadyFunction(self._contribute, self._functions.eager)
            self._step_version = self._growth.trace_version
        self._numbers.clear()
        self._updates.clear()
        self._step(state, rows, jnp.float32(times), totals)
        jax.effects_barrier()
        return dict(self._numbers), [self._updates[number] for number in sorted(self._updates)]
