"""The probe of a step: runs on some rows, on others and on both together show how its numbers and metrics are merged over replicas.

A later batch may tell what a first batch does not. So the probe is repeated, on the rows of the next training batch, until everything is
decided, and now and then after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import jaxpr_as_fun

from unisono._src.keras_private.evaluation import call_as_in_evaluation, have_coarse_layers
from unisono._src.replica import metric_probe, random_keys
from unisono._src.replica.compared_values import find_compared_values, find_factors
from unisono._src.replica.fixed_draws import fix_draws
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
from unisono._src.replica.probe_rows import change_seeds, draw_sample_weights, make_up_rows, perturb_weights
from unisono._src.replica.protocol import Divisor, State
from unisono._src.typing import Array, PyTree

T = TypeVar("T")

MOST_PAIRS = 16
"""The largest number of pairs of replicas' rows that one probe measures."""


class ProbedFunctions(Protocol):
    """The functions of the replicas of a compiled model, as far as a probe calls them. The model's step makes them."""

    model: keras.Model
    eager: bool
    """Whether the functions are called with arrays, not compiled."""
    growth: Growth

    def contribution(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, divisors: Array | None, /
    ) -> object: ...

    def divisors(self, state: State, batch: PyTree, replica: Array, row_fraction: Array, /) -> Sequence[Divisor]: ...

    def gradients_of_numbers(
        self, state: State, batch: PyTree, row_fraction: Array, divisors: Array | None, /
    ) -> dict[str, Array]: ...

    @property
    def is_own(self) -> bool:
        """Return whether the model's class overrides the step."""
        ...


class ProbeRun(NamedTuple):
    """The numbers and metric updates of one run of a step on some rows."""

    numbers: dict[str, Arrays]
    updates: list[metric_probe.MetricUpdate]


class RowPair(NamedTuple):
    """Two batches to measure together: as many rows as one replica has, and as many others."""

    state: State
    one: PyTree
    other: PyTree

    @classmethod
    def of(cls, state: State, both: PyTree) -> RowPair:
        """Return the two halves of some rows as a pair."""
        half = len(jax.tree.leaves(both)[0]) // 2
        return cls(state, slice_rows(both, range(half)), slice_rows(both, range(half, 2 * half)))

    @property
    def both(self) -> PyTree:
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), self.one, self.other)


def pair_shards(state: State, batch: PyTree, shards: Sequence[range], first: int = 0, most: int = MOST_PAIRS) -> list[RowPair]:
    """Return pairs of the shards of neighbouring replicas, from pair number `first` on. Shards of another size than the first are left out.
    One replica alone is paired with itself."""
    alike = [shard for shard in shards if len(shard) == len(shards[0])]
    pairs = list(zip(alike[::2], alike[1::2], strict=False)) or [(alike[0], alike[0])]
    chosen = [pairs[(first + number) % len(pairs)] for number in range(min(most, len(pairs)))]
    return [RowPair(state, slice_rows(batch, one), slice_rows(batch, other)) for one, other in chosen]


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
        self._recorder = metric_probe.UpdateRecorder()
        self._cached_step: tuple[int, SteadyFunction[None]] | None = None
        self._gradients = SteadyFunction(functions.gradients_of_numbers, functions.eager)
        self._divisors = SteadyFunction(self._divisor_array, functions.eager)
        self._probes = 0
        """How many batches were probed."""
        self._is_random: bool | None = None
        """Whether the step draws random numbers that cannot be held still; None before it was tried."""
        self.batch_means: dict[int, bool] = {}
        """The results of `metric_probe.find_batch_means` so far."""
        self._undecided: set[int] = set()
        self._warned: set[int] = set()

    @property
    def is_undecided(self) -> bool:
        """Return whether the kind of a number or a metric is still open."""
        return bool(self._undecided or self._growth.undecided_numbers)

    def at(self, state: State, batch: PyTree, shards: Sequence[range], reset: Sequence[Array]) -> None:
        """Probe a global batch on the host. Then `growth` and `find_batch_means` tell how numbers and metrics are merged.

        Args:
            state: The state before the step.
            batch: The global batch.
            shards: The rows of each replica that has some.
            reset: The values of the metrics' variables after a reset.
        """
        with call_as_in_evaluation(self._model):  # each row for itself: no dropout, no statistics of all rows
            self._probe(state, batch, shards, reset)

    def _probe(self, state: State, batch: PyTree, shards: Sequence[range], reset: Sequence[Array]) -> None:
        first = slice_rows(batch, shards[0])
        totals = self._divisors(state, first)
        if self._is_random is None:
            self._run(state, first, 1, totals)  # this trace finds the numbers that the program compares rows with
            self._is_random = self._is_changed_by_seeds(state, first, totals)
        times = 1
        if self._is_random:
            times = -(
                -(ENOUGH_ROWS_FOR_GRADIENTS if APPLIED_GRADIENTS in self._growth.number_names else ENOUGH_ROWS) // len(shards[0])
            )
            totals = totals * times
        pairs = self._choose_pairs(state, batch, shards, times)
        runs = self._decide_numbers(pairs, totals)
        if self._growth.undecided_numbers and not self._probes:  # for example, after a kernel that begins with zeros
            moved = perturb_weights(state)
            pairs = [*pairs, *(pair._replace(state=moved) for pair in pairs[-2:])]
            runs = self._decide_numbers(pairs, totals)
        if not (self._is_random or self._probes):
            self._compare_gradients(pairs[:: max(1, len(pairs) - 1)], totals)  # the first and the last
        self._decide_metrics(runs, len(shards[0]) * times, reset)
        self._probes += 1
        self._numbers.clear()
        self._recorder.begin()

    def _choose_pairs(self, state: State, batch: PyTree, shards: Sequence[range], times: int) -> list[RowPair]:
        """Return pairs of neighbouring replicas' rows, and made-up pairs; after the first probe, one pair. Where a step draws random numbers, it
        is one shard paired with itself: two runs with different rows cannot be compared."""
        if self._is_random:
            first = jax.tree.map(lambda array: np.concatenate([array] * times), slice_rows(batch, shards[0]))
            return [RowPair(state, first, first)]
        if self._probes or self._functions.eager:  # while a kind is open, all rows are probed, since some of them may tell
            return pair_shards(state, batch, shards, first=self._probes, most=MOST_PAIRS if self.is_undecided else 1)
        most = 2 if APPLIED_GRADIENTS in self._growth.number_names else MOST_PAIRS  # gradients are as large as the model
        real = pair_shards(state, batch, shards, most=most)
        both = real[0].both
        made = make_up_rows(both, self._step.compared_values)
        if not self._functions.is_own:  # a user step defines the structure of its batches
            made += draw_sample_weights(both)
        return [*real, *(RowPair.of(state, rows) for rows in made)]

    def _is_changed_by_seeds(self, state: State, rows: PyTree, totals: Array) -> bool:
        """Return whether other seeds give other numbers."""
        variables = self._model.non_trainable_variables
        if not any(random_keys.is_seed_state(variable) for variable in variables):
            return False
        one, other = (self._run(start, rows, 1, totals) for start in (state, change_seeds(state, variables)))
        pairs = zip(iterate_arrays(one), iterate_arrays(other), strict=True)
        return not all(np.array_equal(array, other_array, equal_nan=True) for array, other_array in pairs)

    def _decide_numbers(self, pairs: Sequence[RowPair], totals: Array) -> list[tuple[ProbeRun, ProbeRun, ProbeRun]]:
        """Decide how numbers grow, and return the runs on each pair: on one part, on the other, on both. Numbers that are made of others are
        measured again if these turn out to be sums."""
        while True:
            evidence: dict[str, list[Measurement]] = {}
            runs: list[tuple[ProbeRun, ProbeRun, ProbeRun]] = []
            for pair in pairs:
                one, other = (self._run(pair.state, rows, 1, totals) for rows in (pair.one, pair.other))
                both = self._run(pair.state, pair.both, 2, totals)
                for what in one.numbers.keys() & other.numbers.keys() & both.numbers.keys():
                    evidence.setdefault(what, []).append(
                        Measurement.of(one.numbers[what], other.numbers[what], both.numbers[what])
                    )
                runs.append((one._replace(numbers={}), other._replace(numbers={}), both._replace(numbers={})))
            if not self._growth.decide_kinds(evidence, self._tolerance):
                return runs

    def _compare_gradients(self, pairs: Sequence[RowPair], totals: Array) -> None:
        """Warn where gradients tell more than numbers: replicas' gradients do not add up to the gradients of the whole batch."""
        slopes: dict[str, list[Measurement]] = {}
        for pair in pairs:
            batches = [(pair.one, 1), (pair.other, 1), (pair.both, 2)]
            gradients = [self._gradients(pair.state, rows, jnp.float32(times), totals) for rows, times in batches]
            for what in gradients[0]:
                slopes.setdefault(what, []).append(Measurement.of(*([np.asarray(by_name[what])] for by_name in gradients)))
        self._growth.compare_gradients(slopes, self._tolerance)

    def _decide_metrics(self, runs: Sequence[tuple[ProbeRun, ProbeRun, ProbeRun]], rows: int, reset: Sequence[Array]) -> None:
        """Decide how metrics are merged. Stop at the run where no metric that is fed is left open."""
        variables = self._model.metrics_variables
        for one, other, both in runs:
            others = metric_probe.UpdatesOnOtherRows(other.updates, both.updates)
            decided = metric_probe.find_batch_means(
                self._metrics,
                variables,
                reset,
                one.updates,
                rows,
                others,
                self._warned,
                self.batch_means,
                max(metric_probe.CLOSE, self._tolerance),
            )
            self.batch_means = decided | self.batch_means
            changed = metric_probe.find_assigned(one.updates, variables, reset)
            self._undecided = changed - self.batch_means.keys()
            if not self._undecided:
                return

    @property
    def _tolerance(self) -> float:
        return ROUGH if self._is_random else HALF if self._is_coarse else EXACT

    def _divisor_array(self, state: State, rows: PyTree) -> Array:
        """Return the loss divisors of these rows."""
        divisors = self._functions.divisors(state, rows, jnp.int32(0), jnp.float32(1))
        return jnp.array([0 if divisor is None else divisor for divisor in divisors], jnp.float32)

    @property
    def _step(self) -> SteadyFunction[None]:
        """Return the step, traced anew when more is known of its numbers."""
        known = self._growth.trace_version
        if self._cached_step is None or self._cached_step[0] != known:
            self._cached_step = known, SteadyFunction(self._contribute, self._functions.eager)
        return self._cached_step[1]

    def _contribute(self, state: State, rows: PyTree, row_fraction: Array, totals: Array) -> None:
        with self._growth.measure_numbers(self._numbers), metric_probe.note_updates(self._metrics, self._recorder.note):
            self._functions.contribution(state, rows, jnp.int32(0), row_fraction, totals)

    def _run(self, state: State, rows: PyTree, times: int, totals: Array) -> ProbeRun:
        """Run the step on these rows, which are `times` as many as a replica has."""
        self._numbers.clear()
        self._recorder.begin()
        self._step(state, rows, jnp.float32(times), totals)
        jax.effects_barrier()
        return ProbeRun(dict(self._numbers), self._recorder.updates)


class SteadyFunction(Generic[T]):
    """A function of a state and rows, compiled for each shape of rows with random draws that are the same for every row."""

    def __init__(self, function: Callable[..., T], eager: bool) -> None:
        """`eager`: the function is called as it is."""
        self._function = function
        self._eager = eager
        self._compiled: dict[object, tuple[Callable[..., list[Array]], jax.tree_util.PyTreeDef]] = {}
        self.compared_values: dict[int, set[float]] = {}
        """The numbers that it compares the arrays of its rows with, by the arrays' positions."""
        self.factors: set[float] = set()
        """The numbers by which it multiplies or divides, whatever the number of rows."""

    def __call__(self, state: State, rows: PyTree, *more: PyTree) -> T:
        args = state, rows, *more
        if self._eager:
            return self._function(*args)
        leaves = jax.tree.leaves(args)
        kind = jax.tree.structure(args), tuple((np.shape(leaf), str(leaf.dtype)) for leaf in leaves)
        if kind not in self._compiled:
            traced, out = jax.make_jaxpr(self._function, return_shape=True)(*args)
            before = len(jax.tree.leaves(state))
            places = range(before, before + len(jax.tree.leaves(rows)))
            self.compared_values = {place - before: values for place, values in find_compared_values(traced, places).items()}
            new_factors = find_factors(traced)
            self.factors = new_factors & self.factors if self._compiled else new_factors
            run = jax.jit(jaxpr_as_fun(fix_draws(traced)))
            self._compiled[kind] = run, jax.tree.structure(out)
        run, structure = self._compiled[kind]
        return jax.tree.unflatten(structure, run(*leaves))


def slice_rows(batch: PyTree, rows: range) -> PyTree:
    return jax.tree.map(lambda array: array[rows.start : rows.stop], batch)


def iterate_arrays(run: ProbeRun) -> Iterator[np.ndarray]:
    """Yield the arrays of all numbers and updates of a run."""
    numbers = [run.numbers[what] for what in sorted(run.numbers)]
    for array in jax.tree.leaves([*numbers, *(update.arrays for update in run.updates)]):
        yield np.asarray(array, "float64")
