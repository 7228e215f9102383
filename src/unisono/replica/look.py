"""Steps on some rows, on others and on both together, before the first step: by them it shows how a step's numbers and metrics are merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from unisono import keras_seam
from unisono.replica import metric_evidence, randomness
from unisono.replica.base import State
from unisono.replica.growth import ENOUGH, ENOUGH_FOR_GRADIENTS, EXACT, HALF, ROUGH, Growth
from unisono.xla import tracing

APPLIED = "what train_step applies as gradients"
"""The name of these among a step's numbers."""


class Tried(Protocol):
    """The functions of the replicas that are tried."""

    model: Any
    eager: bool
    growth: Growth
    contribution: Callable[..., Any]
    divisors: Callable[..., Any]
    gradients_of_numbers: Callable[..., dict[str, Any]]


class Shown(NamedTuple):
    """What a step showed on some rows."""

    numbers: dict[str, Any]
    updates: list[metric_evidence.Update]

    def arrays(self) -> list[np.ndarray]:
        """Return all that it showed."""
        seen = [*(self.numbers[what] for what in sorted(self.numbers)), *(update.arrays for update in self.updates)]
        return [np.asarray(array, "float64") for array in jax.tree.leaves(seen)]


class Look:
    """Of one replica's functions at a global batch."""

    def __init__(self, functions: Tried, metrics: Sequence[Any]) -> None:
        """`metrics` are those of which nobody has promised that they are sums."""
        self._functions = functions
        self._growth = functions.growth
        self._metrics = metrics
        self._compiled = tracing.jitted_unless(functions.eager)
        self._model = functions.model
        self._kinds = {layer.compute_dtype for layer in keras_seam.layers_of(self._model)}
        self._is_random = False

    def weighted_by_share(self, state: State, batch: Any, first: range, reset: list[Any]) -> dict[int, bool]:
        """Return what `metric_evidence.weighted_by_share` does; how numbers grow is known to `growth` then.

        Args:
            state: The state before the first step.
            batch: A global batch on the host.
            first: The rows of the first replica in it.
            reset: The values of the metrics' variables after a reset.
        """
        with keras_seam.in_evaluation(self._model):  # as rows by themselves: neither drawn nor by the statistics of all
            return self._weighted_by_share(state, batch, first, reset)

    def _weighted_by_share(self, state: State, batch: Any, first: range, reset: list[Any]) -> dict[int, bool]:
        cut = lambda rows, times=1: jax.tree.map(lambda a: np.concatenate([a[rows.start : rows.stop]] * times), batch)  # noqa: E731
        totals = self._totals_of(state, cut(first))
        self._is_random = self._draws(state, cut(first), totals)
        times = 1
        if self._is_random:
            times = -(-(ENOUGH_FOR_GRADIENTS if APPLIED in self._growth.asked_for else ENOUGH) // len(first))
            totals = totals * times
        parts = cut(first, times), cut(self._others(batch, first), times)
        one, other, both = self._decided(state, parts, totals)
        if self._growth.undecided:  # as behind a kernel that begins with zeros
            state = with_other_weights(state)
            one, other, both = self._decided(state, parts, totals)
        if not self._is_random:
            self._compare(state, parts, totals, [one, other, both])
        others, variables = metric_evidence.Other(other.updates, both.updates), self._model.metrics_variables
        return metric_evidence.weighted_by_share(self._metrics, variables, reset, one.updates, len(first) * times, others)

    def _others(self, batch: Any, first: range) -> range:
        """As many other rows; the same where a step draws, so that what it makes of rows together is not made of what it makes of each."""
        after = range(first.stop, first.stop + len(first))
        return after if after.stop <= jax.tree.leaves(batch)[0].shape[0] and not self._is_random else first

    def _draws(self, state: State, rows: Any, totals: Any) -> bool:
        """Whether other seeds make other numbers."""
        variables = self._model.non_trainable_variables
        if not any(randomness.is_seed(v) for v in variables):
            return False
        weights, others, *more = state
        moved = [value + 1 if randomness.is_seed(v) else value for v, value in zip(variables, others, strict=True)]
        one, other = (self._shown(s, [rows], 1, totals)[0].arrays() for s in (state, (weights, moved, *more)))
        return not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))

    def _decided(self, state: State, parts: tuple[Any, Any], totals: Any) -> list[Shown]:
        """What a step shows on both parts and on all of their rows. What is made of numbers that turn out to be sums is measured again."""
        while True:
            one, other = self._shown(state, [*parts], 1, totals)
            (both,) = self._shown(state, [jax.tree.map(lambda *a: np.concatenate(a), *parts)], 2, totals)
            if not self._growth.decide((one.numbers, other.numbers), both.numbers, self._tolerance):
                return [one, other, both]

    def _compare(self, state: State, parts: tuple[Any, Any], totals: Any, shown: list[Shown]) -> None:
        """Say where gradients tell what numbers did not: that replicas' gradients do not add up to those of the whole batch."""
        gradients = self._compiled(self._functions.gradients_of_numbers)
        batches = [(parts[0], 1), (parts[1], 1), (jax.tree.map(lambda *a: np.concatenate(a), *parts), 2)]
        slopes = [jax.device_get(gradients(state, rows, jnp.float32(times), totals)) for rows, times in batches]
        applied = [{what: array for what, array in seen.numbers.items() if what == APPLIED} for seen in shown]
        one, other, both = (more | own for more, own in zip(slopes, applied, strict=True))
        self._growth.compare((one, other), both, self._tolerance)

    @property
    def _tolerance(self) -> float:
        return ROUGH if self._is_random else HALF if self._kinds & {"bfloat16", "float16"} else EXACT

    def _totals_of(self, state: State, rows: Any) -> Any:
        """The divisors of these rows."""
        divisors = self._compiled(lambda state, rows: self._functions.divisors(state, rows, jnp.int32(0), jnp.float32(1)))
        return jnp.array([0 if d is None else d for d in divisors(state, rows)], jnp.float32)

    def _shown(self, state: State, batches: list[Any], times: int, totals: Any) -> list[Shown]:
        """What a step shows on each of these batches, which have `times` times the replica's rows."""
        numbers, fed = self._growth.measure(), metric_evidence.Fed()

        @self._compiled
        def step(state: State, rows: Any) -> None:
            with metric_evidence.noted(self._metrics, fed.note):
                self._functions.contribution(state, rows, jnp.int32(0), jnp.float32(times), totals)

        shown = []
        for batch in batches:
            fed.begin()
            step(state, batch)
            jax.effects_barrier()
            shown.append(Shown(dict(numbers), fed.updates))
        return shown


def with_other_weights(state: State) -> State:
    """Return the state with weights that are not zero."""
    rng = np.random.default_rng(0)

    def moved(weight: Any) -> Any:
        is_float = jnp.issubdtype(weight.dtype, jnp.floating)
        return weight + jnp.asarray(rng.normal(0, 0.1, weight.shape), weight.dtype) if is_float else weight

    return [moved(weight) for weight in state[0]], *state[1:]
