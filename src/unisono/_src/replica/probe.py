"""A step that is looked at: on some rows, on others and on both together it shows how its numbers and metrics are merged.

What a first batch does not tell, a later one may: a look is repeated, on the rows that are trained on then, until everything is decided, and
now and then after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from unisono._src import keras_private
from unisono._src.replica import metric_probe, random_keys
from unisono._src.replica.compared_values import compared_values, factors
from unisono._src.replica.fixed_draws import with_steady_draws
from unisono._src.replica.growth import APPLIED, ENOUGH, ENOUGH_FOR_GRADIENTS, EXACT, HALF, ROUGH, Arrays, Growth, Measured
from unisono._src.replica.probe_rows import other_rows, with_drawn_weights, with_other_seeds, with_other_weights
from unisono._src.replica.protocol import State

MOST_PAIRS = 16
"""Pairs of replicas' rows that are measured in one look."""


class Tried(Protocol):
    """The functions of the replicas that are tried."""

    model: Any
    eager: bool
    growth: Growth
    contribution: Callable[..., Any]
    divisors: Callable[..., Any]
    gradients_of_numbers: Callable[..., dict[str, Any]]

    @property
    def is_own(self) -> bool:
        """Whether the step is one of the model's own."""
        ...


class Shown(NamedTuple):
    """What a step showed on some rows."""

    numbers: dict[str, Arrays]
    updates: list[metric_probe.Update]


class Pair(NamedTuple):
    """What is measured together: as many rows as one replica has, and as many others."""

    state: State
    one: Any
    other: Any

    @classmethod
    def of(cls, state: State, both: Any) -> Pair:
        """Return both halves of some rows."""
        half = len(jax.tree.leaves(both)[0]) // 2
        return cls(state, rows_of(both, range(half)), rows_of(both, range(half, 2 * half)))

    @property
    def both(self) -> Any:
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), self.one, self.other)


def real_pairs(state: State, batch: Any, shards: Sequence[range], first: int = 0, most: int = MOST_PAIRS) -> list[Pair]:
    """Return the rows of neighbouring replicas that have as many as the first one, from the pair of the number `first` on; of one replica alone,
    its rows twice."""
    alike = [shard for shard in shards if len(shard) == len(shards[0])]
    pairs = list(zip(alike[::2], alike[1::2], strict=False)) or [(alike[0], alike[0])]
    chosen = [pairs[(first + number) % len(pairs)] for number in range(min(most, len(pairs)))]
    return [Pair(state, rows_of(batch, one), rows_of(batch, other)) for one, other in chosen]


class Look:
    """Of one replica's functions at global batches."""

    def __init__(self, functions: Tried, metrics: Sequence[Any]) -> None:
        """`metrics` are those of which nobody has promised that they are sums."""
        self._functions = functions
        self._growth = functions.growth
        self._metrics = metrics
        self._model = functions.model
        self._is_coarse = keras_private.are_coarse([self._model])
        self._numbers: dict[str, Arrays] = {}
        self._fed = metric_probe.Fed()
        self._programs: tuple[int, TracedAnew] | None = None
        self._gradients = TracedAnew(functions.gradients_of_numbers, functions.eager)
        self._divisors = TracedAnew(self._as_array, functions.eager)
        self._times = 0
        """How many looks there were."""
        self._is_random: bool | None = None
        """Whether the step draws what cannot be held still; None before it was tried."""
        self.weighted_by_share: dict[int, bool] = {}
        """What `metric_evidence.weighted_by_share` found so far."""
        self._undecided: set[int] = set()
        self._said: set[int] = set()

    @property
    def is_undecided(self) -> bool:
        """Whether something told nothing so far."""
        return bool(self._undecided or self._growth.undecided)

    def at(self, state: State, batch: Any, shards: Sequence[range], reset: list[Any]) -> None:
        """Look at a global batch on the host; `growth` and `weighted_by_share` say then what numbers and metrics are.

        Args:
            state: The state before the step.
            batch: The global batch.
            shards: The rows of each replica that has some.
            reset: The values of the metrics' variables after a reset.
        """
        with keras_private.in_evaluation(self._model):  # as rows by themselves: neither drawn nor by the statistics of all
            self._at(state, batch, shards, reset)

    def _at(self, state: State, batch: Any, shards: Sequence[range], reset: list[Any]) -> None:
        first = rows_of(batch, shards[0])
        totals = self._divisors(state, first)
        if self._is_random is None:
            self._shown(state, first, 1, totals)  # from here on it is known what its program compares
            self._is_random = self._draws(state, first, totals)
        times = 1
        if self._is_random:
            times = -(-(ENOUGH_FOR_GRADIENTS if APPLIED in self._growth.asked_for else ENOUGH) // len(shards[0]))
            totals = totals * times
        pairs = self._pairs(state, batch, shards, times)
        shown = self._decided(pairs, totals)
        if self._growth.undecided and not self._times:  # as behind a kernel that begins with zeros
            moved = with_other_weights(state)
            pairs = [*pairs, *(pair._replace(state=moved) for pair in pairs[-2:])]
            shown = self._decided(pairs, totals)
        if not (self._is_random or self._times):
            self._compare(pairs[:: max(1, len(pairs) - 1)], totals)  # the first and the last
        self._look_at_metrics(shown, len(shards[0]) * times, reset)
        self._times += 1
        self._numbers.clear()
        self._fed.begin()

    def _pairs(self, state: State, batch: Any, shards: Sequence[range], times: int) -> list[Pair]:
        """Return the rows of neighbouring replicas, and made up ones; after the first look, those of two replicas. Where a step draws, the same
        rows twice: what it makes of rows together is then not made of what it makes of each."""
        if self._is_random:
            first = jax.tree.map(lambda a: np.concatenate([a] * times), rows_of(batch, shards[0]))
            return [Pair(state, first, first)]
        if self._times or self._functions.eager:  # a look at what is undecided is at all rows, since some of them may tell
            return real_pairs(state, batch, shards, first=self._times, most=MOST_PAIRS if self.is_undecided else 1)
        most = 2 if APPLIED in self._growth.asked_for else MOST_PAIRS  # gradients are as large as the model
        real = real_pairs(state, batch, shards, most=most)
        both = real[0].both
        made = other_rows(both, self._program.compared)
        if not self._functions.is_own:  # whose batches are what it makes of them
            made += with_drawn_weights(both)
        return [*real, *(Pair.of(state, rows) for rows in made)]

    def _draws(self, state: State, rows: Any, totals: Any) -> bool:
        """Return whether other seeds make other numbers."""
        variables = self._model.non_trainable_variables
        if not any(random_keys.is_seed(v) for v in variables):
            return False
        one, other = (self._shown(s, rows, 1, totals) for s in (state, with_other_seeds(state, variables)))
        return not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(all_of(one), all_of(other), strict=True))

    def _decided(self, pairs: Sequence[Pair], totals: Any) -> list[tuple[Shown, Shown, Shown]]:
        """Return what a step shows on each pair. What is made of numbers that turn out to be sums is measured again."""
        while True:
            evidence: dict[str, list[Measured]] = {}
            shown = []
            for pair in pairs:
                one, other = (self._shown(pair.state, rows, 1, totals) for rows in (pair.one, pair.other))
                both = self._shown(pair.state, pair.both, 2, totals)
                for what in one.numbers.keys() & other.numbers.keys() & both.numbers.keys():
                    evidence.setdefault(what, []).append(Measured.of(one.numbers[what], other.numbers[what], both.numbers[what]))
                shown.append(tuple(seen._replace(numbers={}) for seen in (one, other, both)))
            if not self._growth.decide(evidence, self._tolerance):
                return shown

    def _compare(self, pairs: Sequence[Pair], totals: Any) -> None:
        """Say where gradients tell what numbers did not: that replicas' gradients do not add up to those of the whole batch."""
        slopes: dict[str, list[Measured]] = {}
        for pair in pairs:
            batches = [(pair.one, 1), (pair.other, 1), (pair.both, 2)]
            found = [self._gradients(pair.state, rows, jnp.float32(times), totals) for rows, times in batches]
            for what in found[0]:
                slopes.setdefault(what, []).append(Measured.of(*([np.asarray(of[what])] for of in found)))
        self._growth.compare(slopes, self._tolerance)

    def _look_at_metrics(self, shown: Sequence[tuple[Shown, Shown, Shown]], rows: int, reset: list[Any]) -> None:
        """Measure until each metric that is fed has told what it is."""
        variables = self._model.metrics_variables
        for one, other, both in shown:
            others = metric_probe.Other(other.updates, both.updates)
            found = metric_probe.weighted_by_share(
                self._metrics,
                variables,
                reset,
                one.updates,
                rows,
                others,
                self._said,
                self.weighted_by_share,
                max(metric_probe.CLOSE, self._tolerance),
            )
            self.weighted_by_share = found | self.weighted_by_share
            changed = metric_probe.assigned_by(one.updates, variables, reset)
            self._undecided = changed - self.weighted_by_share.keys()
            if not self._undecided:
                return

    @property
    def _tolerance(self) -> float:
        return ROUGH if self._is_random else HALF if self._is_coarse else EXACT

    def _as_array(self, state: State, rows: Any) -> Any:
        """Return the divisors of these rows."""
        divisors = self._functions.divisors(state, rows, jnp.int32(0), jnp.float32(1))
        return jnp.array([0 if d is None else d for d in divisors], jnp.float32)

    @property
    def _program(self) -> TracedAnew:
        """The step, with what is known of its numbers now."""
        known = self._growth.known_in_trace
        if self._programs is None or self._programs[0] != known:
            self._programs = known, TracedAnew(self._step, self._functions.eager)
        return self._programs[1]

    def _step(self, state: State, rows: Any, share: Any, totals: Any) -> None:
        with self._growth.measuring(self._numbers), metric_probe.noted(self._metrics, self._fed.note):
            self._functions.contribution(state, rows, jnp.int32(0), share, totals)

    def _shown(self, state: State, rows: Any, times: int, totals: Any) -> Shown:
        """Return what a step shows on these rows, which are `times` times those of a replica."""
        self._numbers.clear()
        self._fed.begin()
        self._program(state, rows, jnp.float32(times), totals)
        jax.effects_barrier()
        return Shown(dict(self._numbers), self._fed.updates)


class TracedAnew:
    """A function of a state and rows, compiled for each kind of rows with random draws that are the same for every row."""

    def __init__(self, function: Callable[..., Any], eager: bool) -> None:
        """`eager`: whether it is called as it is."""
        self._function = function
        self._eager = eager
        self._compiled: dict[Any, tuple[Callable[..., Any], Any]] = {}
        self.compared: dict[int, set[float]] = {}
        """With which numbers it compares the arrays of its rows, by their places among these."""
        self.factors: set[float] = set()
        """By which numbers it multiplies or divides, however many rows there are."""

    def __call__(self, state: State, rows: Any, *more: Any) -> Any:
        args = state, rows, *more
        if self._eager:
            return self._function(*args)
        leaves = jax.tree.leaves(args)
        kind = jax.tree.structure(args), tuple((np.shape(leaf), str(leaf.dtype)) for leaf in leaves)
        if kind not in self._compiled:
            traced, out = jax.make_jaxpr(self._function, return_shape=True)(*args)
            before = len(jax.tree.leaves(state))
            places = range(before, before + len(jax.tree.leaves(rows)))
            self.compared = {place - before: values for place, values in compared_values(traced, places).items()}
            here = factors(traced)
            self.factors = here & self.factors if self._compiled else here
            run = jax.jit(jaxpr_as_fun(with_steady_draws(traced)))
            self._compiled[kind] = run, jax.tree.structure(out)
        run, structure = self._compiled[kind]
        return jax.tree.unflatten(structure, run(*leaves))


def rows_of(batch: Any, rows: range) -> Any:
    return jax.tree.map(lambda a: a[rows.start : rows.stop], batch)


def all_of(shown: Shown) -> Iterator[np.ndarray]:
    """Return all that a step showed."""
    numbers = [shown.numbers[what] for what in sorted(shown.numbers)]
    for array in jax.tree.leaves([*numbers, *(update.arrays for update in shown.updates)]):
        yield np.asarray(array, "float64")
