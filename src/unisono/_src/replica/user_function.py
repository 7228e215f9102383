"""Replicas that run a user function: the function that `strategy.run` gets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from unisono._src.keras_private.evaluation import call_as_in_evaluation, have_coarse_layers
from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.optimizers import list_optimizer_weights
from unisono._src.replica import metric_probe, metric_updates, metrics, optimizer_update, overwritten, state_merging
from unisono._src.replica.compiled_model import list_loss_scales
from unisono._src.replica.contribution import Contribution
from unisono._src.replica.fixed_draws import SteadyFunction
from unisono._src.replica.gradient_changes import find_gradient_fault, warn_of_gradients
from unisono._src.replica.growth import EXACT, GRADIENT_SLACK, HALF
from unisono._src.replica.probe_rows import RowPair, make_up_rows, pair_shards
from unisono._src.replica.protocol import Divisor, State
from unisono._src.replica.row_coupling import OutputRows
from unisono._src.replica.trace_recorder import ReplicaCode, ReplicaScope, run_as_replica
from unisono._src.typing import Array, Outputs, PyTree, Shape, UserObject

CallUserFunction: TypeAlias = Callable[[PyTree, Sequence[Array]], Outputs]
"""`call(batch, constants)` calls the user's function."""


MOST_DIVISORS = 64
MOST_PAIRS = 2
"""Pairs of replicas' rows that are measured in one probe."""
MOST_OF_GRADIENTS = 4
"""Pairs of any rows on which gradients are measured. Each measurement is as large as the weights."""


class UsedVariables(NamedTuple):
    """The variables that the code reads and assigns."""

    weights: list[keras.Variable]
    """Trainable variables."""
    non_trainable: list[keras.Variable]
    optimizers: list[keras.optimizers.Optimizer]
    metrics: list[keras.metrics.Metric]
    applied_optimizers: list[tuple[keras.optimizers.Optimizer, list[int]]]
    """Optimizers that are applied, and the positions, among their weights, of the weights that get a gradient."""
    assigned: list[int]
    """Positions, among the others, of the variables that the code assigns."""
    reads_slots: bool
    """Whether replicas read the state of an optimizer, beside a loss scale."""

    @property
    def slots(self) -> list[keras.Variable]:
        return [variable for optimizer in self.optimizers for variable in optimizer.variables]

    @property
    def metric_variables(self) -> list[keras.Variable]:
        """Return the variables of the metrics."""
        return [variable for metric in self.metrics for variable in metric.variables]

    @property
    def all(self) -> list[list[keras.Variable]]:
        """Return all variables, in the groups of the state."""
        return [self.weights, self.non_trainable, self.slots, self.metric_variables]


class UserComputation:
    """The functions of replicas that run user code."""

    def __init__(
        self,
        name: str,
        call: CallUserFunction,
        variables: UsedVariables,
        replicas: int,
        layers: Callable[[], Sequence[keras.Layer]] = tuple,
        can_be_cut: bool = True,
        eager: bool = False,
    ) -> None:
        """
        Args:
            name: The name of the user's function.
            call: Calls the function.
            variables: The variables that it uses.
            replicas: R.
            layers: Returns the layers that the function may call.
            can_be_cut: Whether the code gets a batch's rows alone, so that a probe can cut a replica's rows out of the batch.
            eager: Whether the code is called with arrays, also in a probe.
        """
        self._name = name
        self._find_layers = layers
        self._eager = eager
        self._call = call
        self._replicas = replicas
        self._can_be_cut = can_be_cut
        self.variables = variables
        self.has_one_replica = replicas == 1
        self.returned: PyTree = None
        """The tree that the code returns, with an `OutputLeaf` in the place of each array."""
        self.fixed_divisors: list[tuple[float, int]] = []
        """The numbers by which the code itself divides losses, each with the number of values of a row that it divides."""
        self._batch_means: dict[int, bool] = {}
        self._by_rows = OutputRows(eager)
        self._effects = SteadyFunction(self._compute_effects, eager)
        self._metric_calls: dict[tuple[Shape, ...], list[UserObject]] = {}
        """For rows of each shape, the calls that feed metrics, in turn: (metric, `metric_probe.Update.filled`)."""
        self._changes_gradients = False
        self._probe_count = 0
        self.is_said = False
        """Whether the user was told that the applied gradients are not those of one batch."""
        self._undecided: set[int] = set()
        self._warned_metrics: set[int] = set()

    @hide_masks()
    def contribution(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, divisors: Array | None, constants: Sequence[Array]
    ) -> tuple[Contribution, list[Array]]:
        weights, others, slots, metric_values = state
        variables = self.variables
        rows = count_batch_rows(batch)
        reset = metrics.compute_reset_values(variables.metrics, variables.metric_variables)
        replica_others = state_merging.make_start_values(variables.non_trainable, others, replica)
        start = weights, replica_others, slots, metric_values if self.has_one_replica else reset
        means = metrics.BatchLevelMeans(variables.metrics, self._by_rows)
        with self._run(start, batch, replica, row_fraction, divisors) as code, means.watch():
            returned = self._call(batch, constants)
            outputs, self.returned = split_outputs(returned, code)
        self.fixed_divisors = code.fixed_divisors
        after = (list(map(code.scope.left, *group)) for group in zip(variables.all, start, strict=True))
        _, others_after, _, metrics_after = after
        batch_means = dict.fromkeys(means.variables(), True) | self._batch_means
        contribution = Contribution(
            self._collect_gradients(code),
            state_merging.collect_assigned(
                variables.non_trainable, variables.assigned, self.has_one_replica, others, others_after, rows, replica
            ),
            metrics_after
            if self.has_one_replica
            else metrics.compute_metric_changes(variables.metric_variables, batch_means, reset, metrics_after, row_fraction),
            jnp.float32(0),
            jnp.zeros(len(code.divisors)),
            {str(index): widen_half_precision(output) for index, output in enumerate(outputs) if is_summed(output)},
        )
        return contribution, outputs

    @hide_masks()
    def divisors(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, constants: Sequence[Array]
    ) -> Sequence[Divisor]:
        variables = self.variables
        weights, others, slots, _ = state
        reset = metrics.compute_reset_values(variables.metrics, variables.metric_variables)
        start = weights, state_merging.make_start_values(variables.non_trainable, others, replica), slots, reset
        with self._run(start, batch, replica, row_fraction, None) as code:
            self._call(batch, constants)
        self._changes_gradients |= code.changes_gradients
        return code.divisors

    @contextlib.contextmanager
    def _run(
        self, values: State, batch: PyTree, replica: Array, row_fraction: Array, divisors: Array | None
    ) -> Iterator[ReplicaCode]:
        """Run the block as the code of a replica, with these values of the variables."""
        mapping = [
            pair
            for variables, group in zip(self.variables.all, values, strict=True)
            for pair in zip(variables, group, strict=True)
        ]
        code = ReplicaCode(ReplicaScope(mapping), replica, self._replicas, row_fraction, divisors)
        code.rows = count_batch_rows(batch)
        code.scalers = find_loss_scalers(self.variables.applied_optimizers)
        code.begin()
        with run_as_replica(code, self.variables.metrics):
            yield code

    @property
    def _updated_weights(self) -> list[keras.Variable]:
        """Return the weights that optimizers update, optimizer by optimizer."""
        return [
            list_optimizer_weights(optimizer)[position]
            for optimizer, positions in self.variables.applied_optimizers
            for position in positions
        ]

    def _collect_gradients(self, code: ReplicaCode) -> list[Array]:
        """Return the gradients that the code applies, optimizer by optimizer."""
        by_optimizer = {id(update.optimizer): update.gradients for update in code.updates}
        applied: list[Array] = []
        for optimizer, positions in self.variables.applied_optimizers:
            weights = list_optimizer_weights(optimizer)
            gradients = by_optimizer[id(optimizer)]
            applied += [gradients[id(weights[position])] for position in positions]
        applied = [
            gradient.astype(jnp.float32) if jnp.issubdtype(gradient.dtype, jnp.floating) else gradient for gradient in applied
        ]
        return overwritten.spread_over_replicas(self._updated_weights, applied, code.replica, self._replicas)

    def finish_step(self, state: State, total: Contribution, rows: Array, present: Array) -> tuple[State, list[Array]]:
        weights, others, slots, metric_values = state
        variables = self.variables
        values = {
            id(variable): value
            for group, group_values in ((variables.weights, weights), (variables.slots, slots))
            for variable, value in zip(group, group_values, strict=True)
        }
        updated_weights = self._updated_weights
        before = [values[id(weight)] for weight in updated_weights]
        gradients = iter(overwritten.take_largest_gradients(updated_weights, before, total.gradients, self._replicas))
        for optimizer, positions in variables.applied_optimizers:
            optimizer_weights = list_optimizer_weights(optimizer)
            optimizer_slots = optimizer.variables
            by_position = {position: next(gradients) for position in positions}
            new_values = optimizer_update.apply_gradients(
                optimizer,
                [values[id(slot)] for slot in optimizer_slots],
                [by_position.get(position) for position in range(len(optimizer_weights))],
                [values[id(weight)] for weight in optimizer_weights],
            )
            values |= {
                id(variable): value
                for group, group_values in zip((optimizer_weights, optimizer_slots), new_values, strict=True)
                for variable, value in zip(group, group_values, strict=True)
            }
        merged, disagree = state_merging.merge_assigned(
            variables.non_trainable, variables.assigned, self.has_one_replica, others, total.assigned, rows, present
        )
        after = [values[id(weight)] for weight in variables.weights], merged, [values[id(slot)] for slot in variables.slots]
        return (*after, optimizer_update.add_to_metrics(metric_values, total.metrics, self.has_one_replica)), disagree

    def results(self, state: State) -> dict[str, Array]:
        return {}

    def run_alone(self, state: State, batch: PyTree) -> None:
        return None

    def read(self) -> list[bool]:
        return [True, True, self.variables.reads_slots, False]

    def scales(self) -> list[tuple[int, int]]:
        scales = {id(variable) for optimizer, _ in self.variables.applied_optimizers for variable in list_loss_scales(optimizer)}
        return [(2, index) for index, variable in enumerate(self.variables.slots) if id(variable) in scales]

    def probe(self, state: State, batch: PyTree, shards: Sequence[range], constants: Sequence[Array]) -> bool:
        """Find out how the user's metrics are merged, and whether gradients that the code makes add up."""
        user_metrics = metrics.find_unproven_metrics(self.variables.metrics)
        measures_gradients = self._measures_gradients
        if self.has_one_replica or not self._can_be_cut or not (user_metrics or measures_gradients):
            return False
        before = self._batch_means
        with call_as_in_evaluation(*self._find_layers()):
            pairs = pair_shards(state, batch, shards, most=MOST_PAIRS)
            if not (self._probe_count or self._eager):
                self._observe(state, pairs[0].one, 1, constants)  # from here on it is known what its program compares
                pairs += [RowPair.of(state, rows) for rows in make_up_rows(pairs[0].both, self._effects.compared_values)]
            if user_metrics:
                self._probe_metrics(user_metrics, pairs, constants)
            if measures_gradients:
                self._probe_gradients(pairs[:MOST_OF_GRADIENTS], constants)
        self._probe_count += 1
        return self._batch_means != before

    @property
    def _measures_gradients(self) -> bool:
        """Return whether gradients are to be measured: once, and not in eager code, whose random draws cannot be fixed."""
        return self._changes_gradients and not (self.is_said or self._probe_count or self._eager)

    def _probe_metrics(
        self, user_metrics: Sequence[keras.metrics.Metric], pairs: Sequence[RowPair], constants: Sequence[Array]
    ) -> None:
        """Measure until it is decided how each metric that is fed is merged."""
        variables = self.variables.metric_variables
        reset = metrics.compute_reset_values(self.variables.metrics, variables)
        for pair in pairs:
            updates = self._observe(pair.state, pair.one, 1, constants).updates
            other = self._observe_other_rows(pair, constants)
            rows = len(jax.tree.leaves(pair.one)[0])
            known = self._batch_means
            tolerance = max(metric_probe.CLOSE, self._tolerance)
            decided = metric_probe.find_batch_means(
                user_metrics, variables, reset, updates, rows, other, self._warned_metrics, known, tolerance
            )
            self._batch_means = decided | known | find_means_of_numbers(updates, rows)
            changed = metric_probe.find_assigned(updates, variables, reset)
            self._undecided = set() if other is None else changed - self._batch_means.keys()
            if not self._undecided:
                return

    def _probe_gradients(self, pairs: Sequence[RowPair], constants: Sequence[Array]) -> None:
        """Warn once of gradients that the code has made or changed, and that do not add up."""
        observed = list(self._observe_gradients(pairs, constants))
        fault = find_gradient_fault(observed, self._replicas, self._effects.factors, GRADIENT_SLACK * self._tolerance)
        if fault is not None:
            self.is_said = True
            warn_of_gradients(self._name, fault, self._replicas)

    @property
    def _tolerance(self) -> float:
        return HALF if have_coarse_layers(self._find_layers()) else EXACT

    @property
    def needs_probe(self) -> bool:
        return self._probe_count > 0

    @property
    def is_undecided(self) -> bool:
        return bool(self._undecided)

    def _observe_other_rows(self, pair: RowPair, constants: Sequence[Array]) -> metric_updates.UpdatesOnOtherRows | None:
        """Return the metric updates of the code on other rows; None where the code cannot run on more rows than a replica has."""
        if self._eager:  # eager code may draw random numbers that cannot be fixed
            return None
        other_updates = self._observe(pair.state, pair.other, 1, constants).updates
        try:
            return metric_updates.UpdatesOnOtherRows(other_updates, self._observe(pair.state, pair.both, 2, constants).updates)
        except Exception:
            return None

    def _observe_gradients(
        self, pairs: Sequence[RowPair], constants: Sequence[Array]
    ) -> Iterator[tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]]:
        """Return the gradients that the code applies on each pair; none where the code cannot run on more rows than a replica has."""
        with contextlib.suppress(Exception):
            for pair in pairs:
                observed = (self._observe(pair.state, rows, times, constants).gradients for rows, times in pair.batches)
                one, other, both = ([np.asarray(gradient) for gradient in gradients] for gradients in observed)
                yield one, other, both

    def _observe(self, state: State, rows: PyTree, times: int, constants: Sequence[Array]) -> Effects:
        """Return the effects of the code on these rows, which are `times` times the rows of a replica."""
        rows = jax.tree.map(jnp.asarray, rows)
        arrays_of_updates, gradients = self._effects(state, rows, jnp.float32(times), constants)
        calls = self._metric_calls[list_shapes(rows)]
        updates = [
            metric_updates.MetricUpdate(call[0], arrays, call[1]) for arrays, call in zip(arrays_of_updates, calls, strict=True)
        ]
        return Effects(updates, gradients)

    def _compute_effects(
        self, state: State, rows: PyTree, row_fraction: Array, constants: Sequence[Array]
    ) -> tuple[list[list[Array | None]], list[Array]]:
        """Return (the arrays of each metric update, the gradients that the code applies), and note the metric calls of these rows."""
        variables = self.variables
        user_metrics = metrics.find_unproven_metrics(self.variables.metrics)
        weights, others, slots, _ = state
        start = (
            weights,
            state_merging.make_start_values(variables.non_trainable, others, jnp.int32(0)),
            slots,
            metrics.compute_reset_values(variables.metrics, variables.metric_variables),
        )
        with (
            self._run(start, rows, jnp.int32(0), row_fraction, jnp.ones(MOST_DIVISORS)) as code,
            metric_updates.note_updates(user_metrics, code.note),
            hide_masks(),
        ):
            self._call(rows, constants)
        updates = [noted for noted in code.noted if noted.kind == "update"]
        self._metric_calls[list_shapes(rows)] = [noted.of for noted in updates]
        gradients = [
            gradient.astype(jnp.float32)
            for update in code.updates
            for variable in list_optimizer_weights(update.optimizer)
            if self._measures_gradients and not overwritten.is_overwritten_by_gradient(variable)
            if (gradient := update.gradients.get(id(variable))) is not None and jnp.issubdtype(gradient.dtype, jnp.floating)
        ]
        return [noted.arrays for noted in updates], gradients

    def check(self, disagree: list[Array]) -> None:
        state_merging.check_counters(self.variables.non_trainable, self.variables.assigned, disagree)


class Effects(NamedTuple):
    """The effects of code on some rows: the metric updates, and the gradients that it applies."""

    updates: list[metric_updates.MetricUpdate]
    gradients: list[Array]


def find_means_of_numbers(updates: Sequence[metric_updates.MetricUpdate], rows: int) -> dict[int, bool]:
    """Return the variables of means that are fed with one number. Code computes the mean of a replica's rows in many ways, so the number
    is taken for that mean."""
    means = [
        update.metric
        for update in updates
        if type(update.metric) is keras.metrics.Mean and len(update.arrays) == 1 and not update.has_rows(rows)
    ]
    return {id(variable): True for metric in means for variable in metric.variables}


class OutputLeaf(NamedTuple):
    """The place of an array in a tree that the code returns."""

    index: int


def split_outputs(returned: Outputs, code: ReplicaCode) -> tuple[list[Array], PyTree]:
    """Return (the arrays of a tree, the tree with an `OutputLeaf` in the place of each array).

    A variable that is updated when all replicas have run stays in the tree, as in what `optimizer.apply_gradients` returns.
    """
    leaves, structure = jax.tree.flatten(returned)
    arrays: list[Array] = []
    tree_leaves: list[UserObject] = []
    for leaf in leaves:
        if isinstance(leaf, keras.Variable) and id(leaf) in code.scope.updated_ids:
            tree_leaves.append(leaf)
            continue
        value = getattr(leaf, "value", leaf) if type(leaf).__module__.startswith("keras.") else leaf
        if isinstance(value, (jax.Array, np.ndarray, np.generic, int, float)):
            tree_leaves.append(OutputLeaf(len(arrays)))
            arrays.append(jnp.asarray(value))
        else:
            refuse_hidden_arrays(leaf)
            tree_leaves.append(leaf)
    return arrays, jax.tree.unflatten(structure, tree_leaves)


def refuse_hidden_arrays(leaf: object) -> None:
    """Refuse arrays in an object that JAX does not take for a tree: they would stay behind in the trace."""
    if any(isinstance(value, Tracer) for value in getattr(leaf, "__dict__", {}).values()):
        raise ValueError(
            f"The function returns a {type(leaf).__name__} with arrays in it, which strategy.run cannot look into. Return a tuple, a list, a "
            f"dict or a named tuple of arrays."
        )


def is_summed(output: Array) -> bool:
    """Return whether an output is summed over replicas at once: a single number is. Most are losses, and one sum costs nothing there."""
    return output.ndim == 0 and (jnp.issubdtype(output.dtype, jnp.floating) or output.dtype == jnp.int32)


def widen_half_precision(output: Array) -> Array:
    """Return half precision as float32, in which it is summed; all other arrays as they are."""
    is_half = jnp.issubdtype(output.dtype, jnp.floating) and output.dtype.itemsize < 4
    return output.astype(jnp.float32) if is_half else output


def list_shapes(rows: PyTree) -> tuple[Shape, ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves(rows))


def count_batch_rows(batch: PyTree) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def find_loss_scalers(
    applied: list[tuple[keras.optimizers.Optimizer, list[int]]],
) -> dict[int, keras.optimizers.Optimizer]:
    """Return, for the ids of weights, the optimizer that scales their loss."""
    return {
        id(list_optimizer_weights(optimizer)[position]): optimizer
        for optimizer, positions in applied
        if list_loss_scales(optimizer)
        for position in positions
    }
