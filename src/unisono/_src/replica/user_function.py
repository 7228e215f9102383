"""Replicas that run a user function: the function that `strategy.run` gets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import keras

from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.optimizers import LossScaleOptimizer, list_loss_scales, list_optimizer_weights
from unisono._src.replica import metrics, optimizer_update, overwritten, state_merging
from unisono._src.replica.contribution import Contribution
from unisono._src.replica.function_outputs import is_summed, split_outputs, widen_half_precision
from unisono._src.replica.function_probe import FunctionProbe
from unisono._src.replica.protocol import Divisor, RecordedVariables, State
from unisono._src.replica.row_axes import RowAxes
from unisono._src.replica.row_coupling import OutputRows, describe_shapes
from unisono._src.replica.trace_recorder import ReplicaCode, ReplicaScope, run_as_replica
from unisono._src.replica.untold_loss import UNTOLD_LOSS
from unisono._src.replica.used_variables import UsedVariables
from unisono._src.typed_jax import eval_shape
from unisono._src.typing import Array, Outputs, PyTree, Shape

CallUserFunction: TypeAlias = Callable[[PyTree, Sequence[Array]], Outputs]
"""`call(batch, constants)` calls the user's function."""


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
        has_fixed_losses: bool = False,
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
            has_fixed_losses: Whether a loss is an array whose shape is the same for any number of rows.
        """
        self.call = call
        self._replicas = replicas
        self._can_be_cut = can_be_cut
        self._eager = eager
        self._has_fixed_losses = has_fixed_losses
        self.variables = variables
        self.has_one_replica = replicas == 1
        self.returned: PyTree = None
        """The tree that the code returns, with an `OutputLeaf` in the place of each array."""
        self.fixed_divisors: list[tuple[float, int]] = []
        """The numbers by which the code itself divides losses, each with the number of values of a row that it divides."""
        self._by_rows = OutputRows(eager)
        self._probe = FunctionProbe(self, name, replicas, layers, eager)

    @hide_masks()
    def contribution(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, divisors: Array | None, constants: Sequence[Array]
    ) -> tuple[Contribution, list[Array]]:
        variables = self.variables
        _, others, _, metric_values = state
        *start, reset = self.start_values(state, replica)
        start = *start, metric_values if self.has_one_replica else reset
        axes = self.find_axes(state, batch, constants)
        means = self.make_means(axes)
        with self.run(start, batch, replica, row_fraction, divisors, axes) as code, means.watch():
            returned = self.call(batch, constants)
            outputs, self.returned = split_outputs(returned, code)
            of_rows = map(axes.find_rows, outputs)
            outputs = [output if rows is None else rows for output, rows in zip(outputs, of_rows, strict=True)]
        self.fixed_divisors = code.fixed_divisors
        after = (list(map(code.scope.left, *group)) for group in zip(variables.all, start, strict=True))
        _, others_after, _, metrics_after = after
        contribution = Contribution(
            self._collect_gradients(code),
            state_merging.collect_assigned(
                variables.non_trainable,
                variables.assigned,
                variables.replaced,
                self.has_one_replica,
                others,
                others_after,
                count_batch_rows(batch),
                replica,
            ),
            metrics_after
            if self.has_one_replica
            else means.compute_changes(variables.metric_variables, self._probe.batch_means, reset, metrics_after, row_fraction),
            jnp.float32(0),
            jnp.zeros(len(code.divisors)),
            {str(index): widen_half_precision(output) for index, output in enumerate(outputs) if is_summed(output)},
        )
        return contribution, outputs

    @hide_masks()
    def divisors(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, constants: Sequence[Array]
    ) -> Sequence[Divisor]:
        axes = self.find_axes(state, batch, constants)
        start = self.start_values(state, replica)
        with self.run(start, batch, replica, row_fraction, None, axes) as code, self.make_means(axes).watch():
            self.call(batch, constants)
        self._probe.changes_gradients |= code.changes_gradients
        return code.divisors

    def start_values(self, state: State, replica: Array) -> State:
        """Return the values of the variables from which a replica starts, with metrics that are reset."""
        weights, others, slots, _ = state
        variables = self.variables
        reset = metrics.compute_reset_values(variables.metrics, variables.metric_variables)
        return weights, state_merging.make_start_values(variables.non_trainable, others, replica), slots, reset

    def make_means(self, axes: RowAxes) -> metrics.BatchLevelMeans:
        return metrics.BatchLevelMeans(self.variables.metrics, self._by_rows, axes)

    def find_axes(self, state: State, batch: PyTree, constants: Sequence[Array]) -> RowAxes:
        """Return what tells whether the code hands over values of rows: where that is open, by a trace for twice the rows."""
        rows = count_batch_rows(batch)
        is_open = self._has_fixed_losses or (rows == 1 and not self._eager)
        if not (is_open and self._can_be_cut):
            return RowAxes(rows)
        axes = RowAxes(2 * rows)

        def trace(state: State, batch: PyTree, constants: Sequence[Array]) -> None:
            start = self.start_values(state, jnp.int32(0))
            with self.run(start, batch, jnp.int32(0), jnp.float32(1), None, axes) as code, self.make_means(axes).watch():
                for output in split_outputs(self.call(batch, constants), code)[0]:
                    axes.find_rows(output)

        try:
            eval_shape(trace, state, describe_shapes(batch, 2), constants)
        except Exception:  # the code is for these rows alone
            return RowAxes(rows)
        return RowAxes(rows, axes.noted)

    @contextlib.contextmanager
    def run(
        self,
        values: State,
        batch: PyTree,
        replica: Array,
        row_fraction: Array,
        divisors: Array | None,
        axes: RowAxes,
    ) -> Generator[ReplicaCode]:
        """Run the block as the code of a replica, with these values of the variables."""
        mapping = [
            pair
            for variables, group in zip(self.variables.all, values, strict=True)
            for pair in zip(variables, group, strict=True)
        ]
        code = ReplicaCode(ReplicaScope(mapping), replica, self._replicas, row_fraction, divisors)
        code.rows = count_batch_rows(batch)
        code.axes = axes
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
        return overwritten.spread_over_replicas(
            self._updated_weights, overwritten.widen_floats(applied), code.replica, self._replicas
        )

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
            variables.non_trainable,
            variables.assigned,
            variables.replaced,
            self.has_one_replica,
            others,
            total.assigned,
            rows,
            present,
        )
        after = [values[id(weight)] for weight in variables.weights], merged, [values[id(slot)] for slot in variables.slots]
        return (*after, optimizer_update.add_to_metrics(metric_values, total.metrics, self.has_one_replica)), disagree

    def results(self, state: State) -> dict[str, Array]:
        return {}

    @property
    def has_own_logs(self) -> bool:
        return True

    def read_loss(self, part: Contribution, total: Contribution) -> Array:
        """Return the first number that the code returns, a sum over replicas: the loss, as loops are written."""
        numbers = [value for _, value in sorted(part.logs.items()) if value.size == 1]
        return numbers[0].reshape(()) if numbers else jnp.asarray(UNTOLD_LOSS)

    def list_recorded(self) -> RecordedVariables:
        variables = self.variables
        state = [("weight", variables.weights), ("state", variables.non_trainable), ("optimizer", variables.slots)]
        return [("gradient", self._updated_weights), *state]

    def read(self) -> list[bool]:
        return [True, True, self.variables.reads_slots, False]

    def scales(self) -> list[tuple[int, int]]:
        scales = {id(variable) for optimizer, _ in self.variables.applied_optimizers for variable in list_loss_scales(optimizer)}
        return [(2, index) for index, variable in enumerate(self.variables.slots) if id(variable) in scales]

    def probe(self, state: State, batch: PyTree, shards: Sequence[range], constants: Sequence[Array]) -> bool:
        """Find out how the user's metrics are merged, and whether gradients that the code makes add up."""
        if self.has_one_replica or not self._can_be_cut:
            return False
        return self._probe.at(state, batch, shards, constants)

    def check_draws(self, draws_of: Callable[[int], Sequence[Shape]], rows: int) -> None:
        """Do nothing: the code was inspected."""

    @property
    def needs_probe(self) -> bool:
        return self._probe.count > 0

    @property
    def is_undecided(self) -> bool:
        return self._probe.is_undecided

    def note_said(self, is_said: bool) -> None:
        """Note whether the user was told that the applied gradients are not those of one batch."""
        self._probe.is_said = is_said

    def check(self, disagree: list[Array]) -> None:
        state_merging.check_counters(self.variables.non_trainable, self.variables.assigned, disagree)


def count_batch_rows(batch: PyTree) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def find_loss_scalers(
    applied: list[tuple[keras.optimizers.Optimizer, list[int]]],
) -> dict[int, LossScaleOptimizer]:
    """Return, for the ids of weights, the optimizer that scales their loss."""
    return {
        id(list_optimizer_weights(optimizer)[position]): optimizer
        for optimizer, positions in applied
        if isinstance(optimizer, LossScaleOptimizer)
        for position in positions
    }
