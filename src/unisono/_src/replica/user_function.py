"""Replicas that run code of the user's: what `strategy.run` is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from unisono._src import keras_private
from unisono._src.replica import metric_probe, metrics, optimizer_update, overwritten, state_merging
from unisono._src.replica.compiled_model import scaling_variables
from unisono._src.replica.contribution import Contribution
from unisono._src.replica.gradient_changes import fault_of, warn_of_gradients
from unisono._src.replica.growth import APART, EXACT, HALF
from unisono._src.replica.output_rows import ByRows
from unisono._src.replica.probe import Pair, TracedAnew, real_pairs
from unisono._src.replica.probe_rows import other_rows
from unisono._src.replica.protocol import State
from unisono._src.replica.trace_recorder import ReplicaCode, ReplicaScope, running

Call = Callable[[Any, Any], Any]
"""`call(batch, constants)` calls the user's function."""


MOST_DIVISORS = 64
MOST_PAIRS = 2
"""Pairs of replicas' rows that are measured in one look."""
MOST_OF_GRADIENTS = 4
"""Pairs of any rows on which gradients are measured, each of which is as large as the weights."""


class Variables(NamedTuple):
    """What the code reads and assigns."""

    weights: list[Any]
    """Trainable variables."""
    others: list[Any]
    optimizers: list[Any]
    metrics: list[Any]
    applied: list[tuple[Any, list[int]]]
    """Optimizers that are applied, and the positions, among their weights, of those that get a gradient."""
    assigned: list[int]
    """Positions, among the others, of those that the code assigns."""
    slots_read: bool
    """Whether replicas read the state of an optimizer, beside a loss scale."""

    @property
    def slots(self) -> list[Any]:
        return [v for optimizer in self.optimizers for v in optimizer.variables]

    @property
    def tracked(self) -> list[Any]:
        return [v for metric in self.metrics for v in metric.variables]

    @property
    def all(self) -> list[list[Any]]:
        """In the groups of the state."""
        return [self.weights, self.others, self.slots, self.tracked]


class OwnCode:
    """The functions of replicas that run code of the user's."""

    def __init__(
        self,
        name: str,
        call: Call,
        variables: Variables,
        replicas: int,
        layers: Callable[[], Sequence[Any]] = tuple,
        can_be_cut: bool = True,
        eager: bool = False,
    ) -> None:
        """
        Args:
            name: Of the user's function.
            call: Calls it.
            variables: What it uses.
            replicas: R.
            layers: Those that it may call.
            can_be_cut: Whether a batch's rows are all that the code gets, so that a replica's can be cut out of it to look at.
            eager: Whether the code is called with arrays, also to look at it.
        """
        self._name = name
        self._layers = layers
        self._eager = eager
        self._call = call
        self._replicas = replicas
        self._can_be_cut = can_be_cut
        self.variables = variables
        self.alone = replicas == 1
        self.returned: Any = None
        """The tree that the code returns: `Leaf`s and what is no array."""
        self.fixed_divisors: list[tuple[float, int]] = []
        """What the code divides losses by, where it says so itself, and how many of them there are of a row."""
        self._weighted_by_share: dict[int, bool] = {}
        self._by_rows = ByRows(eager)
        self._feeding = TracedAnew(self._feeds, eager)
        self._fed: dict[Any, list[Any]] = {}
        """For rows of each shape, the metrics that the code feeds, in turn."""
        self._changes_gradients = False
        self._looks = 0
        self.is_said = False
        """Whether the user knows that what the code applies is not what one batch gives."""
        self._undecided: set[int] = set()
        self._said: set[int] = set()

    @keras_private.fresh_masks()
    def contribution(
        self, state: State, batch: Any, replica: Any, share: Any, divisors: Any, constants: Any
    ) -> tuple[Contribution, list[Any]]:
        weights, others, slots, tracked = state
        of, rows = self.variables, rows_of(batch)
        reset = metrics.reset_values(of.metrics, of.tracked)
        start = weights, state_merging.for_replica(of.others, others, replica), slots, tracked if self.alone else reset
        means = metrics.BatchLevelMeans(of.metrics, self._by_rows)
        with self._running(start, batch, replica, share, divisors) as code, means.watch():
            returned = self._call(batch, constants)
            outputs, self.returned = split(returned, code)
        self.fixed_divisors = code.fixed_divisors
        _, others_left, _, tracked_left = (list(map(code.scope.left, *pair)) for pair in zip(of.all, start, strict=True))
        by_share = dict.fromkeys(means.variables(), True) | self._weighted_by_share
        contribution = Contribution(
            self._gradients(code),
            state_merging.handed_on(of.others, of.assigned, self.alone, others, others_left, rows, replica),
            tracked_left if self.alone else metrics.added(of.tracked, by_share, reset, tracked_left, share),
            jnp.float32(0),
            jnp.zeros(len(code.divisors)),
            {str(i): summable(a) for i, a in enumerate(outputs) if is_summed(a)},
        )
        return contribution, outputs

    @keras_private.fresh_masks()
    def divisors(self, state: State, batch: Any, replica: Any, share: Any, constants: Any) -> list[Any]:
        of = self.variables
        weights, others, slots, _ = state
        reset = metrics.reset_values(of.metrics, of.tracked)
        start = weights, state_merging.for_replica(of.others, others, replica), slots, reset
        with self._running(start, batch, replica, share, None) as code:
            self._call(batch, constants)
        self._changes_gradients |= code.changes_gradients
        return code.divisors

    @contextlib.contextmanager
    def _running(self, values: Any, batch: Any, replica: Any, share: Any, totals: Any) -> Iterator[ReplicaCode]:
        mapping = [pair for vs, of in zip(self.variables.all, values, strict=True) for pair in zip(vs, of, strict=True)]
        code = ReplicaCode(ReplicaScope(mapping), replica, self._replicas, share, totals)
        code.rows = rows_of(batch)
        code.scalers = scalers(self.variables.applied)
        code.begin()
        with running(code, self.variables.metrics):
            yield code

    @property
    def _applied_to(self) -> list[Any]:
        """The weights that optimizers update, of all optimizers one behind the other."""
        return [keras_private.weights_of(o)[position] for o, positions in self.variables.applied for position in positions]

    def _gradients(self, code: ReplicaCode) -> list[Any]:
        """Of all optimizers, one behind the other."""
        by_optimizer = {id(update.optimizer): update.gradients for update in code.updates}
        found = []
        for optimizer, positions in self.variables.applied:
            weights, gradients = keras_private.weights_of(optimizer), by_optimizer[id(optimizer)]
            found += [gradients[id(weights[position])] for position in positions]
        found = [g.astype(jnp.float32) if jnp.issubdtype(g.dtype, jnp.floating) else g for g in found]
        return overwritten.spread(self._applied_to, found, code.replica, self._replicas)

    def finished(self, state: State, total: Contribution, rows: Any, present: Any) -> tuple[State, list[Any]]:
        weights, others, slots, tracked = state
        of = self.variables
        values = {id(v): a for vs, group in ((of.weights, weights), (of.slots, slots)) for v, a in zip(vs, group, strict=True)}
        applied_to = self._applied_to
        before = [values[id(v)] for v in applied_to]
        gradients = iter(overwritten.largest(applied_to, before, total.gradients, self._replicas))
        for optimizer, positions in of.applied:
            mine, own = keras_private.weights_of(optimizer), optimizer.variables
            by_position = {position: next(gradients) for position in positions}
            new = optimizer_update.applied(
                optimizer,
                [values[id(v)] for v in own],
                [by_position.get(position) for position in range(len(mine))],
                [values[id(v)] for v in mine],
            )
            values |= {id(v): a for vs, group in zip((mine, own), new, strict=True) for v, a in zip(vs, group, strict=True)}
        merged, disagree = state_merging.merged(of.others, of.assigned, self.alone, others, total.assigned, rows, present)
        after = [values[id(v)] for v in of.weights], merged, [values[id(v)] for v in of.slots]
        return (*after, optimizer_update.added(tracked, total.metrics, self.alone)), disagree

    def results(self, state: State) -> dict[str, Any]:
        return {}

    def alone_by_itself(self, state: State, batch: Any) -> None:
        return None

    def read(self) -> list[bool]:
        return [True, True, self.variables.slots_read, False]

    def scales(self) -> list[tuple[int, int]]:
        scales = {id(v) for optimizer, _ in self.variables.applied for v in scaling_variables(optimizer)}
        return [(2, index) for index, v in enumerate(self.variables.slots) if id(v) in scales]

    def look(self, state: State, batch: Any, shards: Sequence[range], constants: Any) -> bool:
        """Find out how metrics of the user's own are merged, and whether gradients of its own add up."""
        own, with_gradients = metrics.unpromised(self.variables.metrics), self._asks_for_gradients
        if self.alone or not self._can_be_cut or not (own or with_gradients):
            return False
        before = self._weighted_by_share
        with keras_private.in_evaluation(*self._layers()):
            pairs = real_pairs(state, batch, shards, most=MOST_PAIRS)
            if not (self._looks or self._eager):
                self._fed_on(state, pairs[0].one, 1, constants)  # from here on it is known what its program compares
                pairs += [Pair.of(state, rows) for rows in other_rows(pairs[0].both, self._feeding.compared)]
            if own:
                self._look_at_metrics(own, pairs, constants)
            if with_gradients:
                self._look_at_gradients(pairs[:MOST_OF_GRADIENTS], constants)
        self._looks += 1
        return self._weighted_by_share != before

    @property
    def _asks_for_gradients(self) -> bool:
        """Return whether gradients are to be measured: once, and not where draws cannot be held still."""
        return self._changes_gradients and not (self.is_said or self._looks or self._eager)

    def _look_at_metrics(self, own: Sequence[Any], pairs: Sequence[Pair], constants: Any) -> None:
        """Measure until each metric that is fed has told what it is."""
        tracked = self.variables.tracked
        reset = metrics.reset_values(self.variables.metrics, tracked)
        for pair in pairs:
            updates = self._fed_on(pair.state, pair.one, 1, constants).updates
            other, rows = self._fed_beside(pair, constants), len(jax.tree.leaves(pair.one)[0])
            known, tolerance = self._weighted_by_share, max(metric_probe.CLOSE, self._tolerance)
            found = metric_probe.weighted_by_share(own, tracked, reset, updates, rows, other, self._said, known, tolerance)
            self._weighted_by_share = found | known | means_of_numbers(updates, rows)
            changed = metric_probe.assigned_by(updates, tracked, reset)
            self._undecided = set() if other is None else changed - self._weighted_by_share.keys()
            if not self._undecided:
                return

    def _look_at_gradients(self, pairs: Sequence[Pair], constants: Any) -> None:
        """Say once that those which the code has made or changed do not add up."""
        applied = list(self._applied(pairs, constants))
        fault = fault_of(applied, self._replicas, self._feeding.factors, APART * self._tolerance)
        if fault is not None:
            self.is_said = True
            warn_of_gradients(self._name, fault, self._replicas)

    @property
    def _tolerance(self) -> float:
        return HALF if keras_private.are_coarse(self._layers()) else EXACT

    @property
    def is_looked_at(self) -> bool:
        return self._looks > 0

    @property
    def is_undecided(self) -> bool:
        return bool(self._undecided)

    def _fed_beside(self, pair: Pair, constants: Any) -> metric_probe.Other | None:
        """Return what the code feeds metrics with on other rows; None where it runs on no more rows than a replica has."""
        if self._eager:  # where code may draw what cannot be held still
            return None
        other = self._fed_on(pair.state, pair.other, 1, constants).updates
        try:
            return metric_probe.Other(other, self._fed_on(pair.state, pair.both, 2, constants).updates)
        except Exception:
            return None

    def _applied(self, pairs: Sequence[Pair], constants: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Return the gradients that the code applies on each pair; none where it runs on no more rows than a replica has."""
        with contextlib.suppress(Exception):
            for pair in pairs:
                rows = [(pair.one, 1), (pair.other, 1), (pair.both, 2)]
                found = (self._fed_on(pair.state, part, times, constants).gradients for part, times in rows)
                one, other, both = ([np.asarray(gradient) for gradient in gradients] for gradients in found)
                yield one, other, both

    def _fed_on(self, state: State, rows: Any, times: int, constants: Any) -> Fed:
        """Return what the code does with these rows, which are `times` times those of a replica."""
        rows = jax.tree.map(jnp.asarray, rows)
        found, gradients = self._feeding(state, rows, jnp.float32(times), constants)
        updates = [metric_probe.Update(of[0], a, of[1]) for a, of in zip(found, self._fed[shapes_of(rows)], strict=True)]
        return Fed(updates, gradients)

    def _feeds(self, state: State, rows: Any, share: Any, constants: Any) -> tuple[list[Any], list[Any]]:
        of, own = self.variables, metrics.unpromised(self.variables.metrics)
        weights, others, slots, _ = state
        start = (
            weights,
            state_merging.for_replica(of.others, others, jnp.int32(0)),
            slots,
            metrics.reset_values(of.metrics, of.tracked),
        )
        with (
            self._running(start, rows, jnp.int32(0), share, jnp.ones(MOST_DIVISORS)) as code,
            metric_probe.noted(own, code.note),
            keras_private.fresh_masks(),
        ):
            self._call(rows, constants)
        found = [noted for noted in code.noted if noted.kind == "update"]
        self._fed[shapes_of(rows)] = [noted.of for noted in found]
        floats = [
            gradient.astype(jnp.float32)
            for update in code.updates
            for variable in keras_private.weights_of(update.optimizer)
            if self._asks_for_gradients and not overwritten.overwrites(variable)
            if (gradient := update.gradients.get(id(variable))) is not None and jnp.issubdtype(gradient.dtype, jnp.floating)
        ]
        return [noted.arrays for noted in found], floats

    def check(self, disagree: list[Any]) -> None:
        state_merging.check_counters(self.variables.others, self.variables.assigned, disagree)


class Fed(NamedTuple):
    """What code does with some rows: what it feeds metrics with, and the gradients that it applies."""

    updates: list[metric_probe.Update]
    gradients: list[Any]


def means_of_numbers(updates: Sequence[metric_probe.Update], rows: int) -> dict[int, bool]:
    """Return those of means that are fed with one number: it is taken for the mean of a replica's rows, which code makes in many ways."""
    of_numbers = [
        u.metric for u in updates if type(u.metric) is keras.metrics.Mean and len(u.arrays) == 1 and not u.has_rows(rows)
    ]
    return {id(variable): True for metric in of_numbers for variable in metric.variables}


class Leaf(NamedTuple):
    """Stands for an array in a tree that the code returns."""

    index: int


def split(returned: Any, code: ReplicaCode) -> tuple[list[Any], Any]:
    """(the arrays of a tree, the tree with `Leaf`s in their place).

    A variable that is updated when all replicas have run stands for itself, as in what `optimizer.apply_gradients` returns.
    """
    leaves, structure = jax.tree.flatten(returned)
    arrays, kept = [], []
    for leaf in leaves:
        if isinstance(leaf, keras.Variable) and id(leaf) in code.scope.updated:
            kept.append(leaf)
            continue
        value = getattr(leaf, "value", leaf) if type(leaf).__module__.startswith("keras.") else leaf
        if isinstance(value, (jax.Array, np.ndarray, np.generic, int, float)):
            kept.append(Leaf(len(arrays)))
            arrays.append(jnp.asarray(value))
        else:
            refuse_hidden(leaf)
            kept.append(leaf)
    return arrays, jax.tree.unflatten(structure, kept)


def refuse_hidden(leaf: Any) -> None:
    """Arrays in an object that is no tree to JAX would stay behind in the trace."""
    if any(isinstance(value, Tracer) for value in getattr(leaf, "__dict__", {}).values()):
        raise ValueError(
            f"The function returns a {type(leaf).__name__} with arrays in it, which strategy.run cannot look into. Return a tuple, a list, a "
            f"dict or a named tuple of arrays."
        )


def is_summed(output: Any) -> bool:
    """Numbers are summed over replicas at once: most of them are losses, and one sum costs nothing there."""
    return output.ndim == 0 and (jnp.issubdtype(output.dtype, jnp.floating) or output.dtype == jnp.int32)


def summable(output: Any) -> Any:
    """Half precision is summed in float32."""
    half = jnp.issubdtype(output.dtype, jnp.floating) and output.dtype.itemsize < 4
    return output.astype(jnp.float32) if half else output


def shapes_of(rows: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves(rows))


def rows_of(batch: Any) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def scalers(applied: list[tuple[Any, list[int]]]) -> dict[int, Any]:
    """For the ids of weights, the optimizer that scales their loss."""
    return {
        id(keras_private.weights_of(optimizer)[position]): optimizer
        for optimizer, positions in applied
        if scaling_variables(optimizer)
        for position in positions
    }
