"""The function that `strategy.run` gets, as a step.

Replicas compute what they add up of their rows. All rows together say what becomes of the state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, NoReturn, TypeAlias, cast

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._src.engine.row_counts import count_batch_rows
from unisono._src.engine.state import RecordedVariables, State
from unisono._src.keras.private.compiled_losses import hide_masks
from unisono._src.keras.private.optimizers import LossScaleOptimizer, list_optimizer_weights
from unisono._src.keras.replica import optimizer_update
from unisono._src.keras.replica.function_outputs import is_summed, split_outputs, widen_half_precision
from unisono._src.keras.replica.row_axes import RowAxes
from unisono._src.keras.replica.trace_recorder import FindDivisor, ReplicaCode, ReplicaScope, run_as_replica
from unisono._src.keras.replica.used_variables import OwnVariables, UsedVariables
from unisono._src.programs.marks import BATCH_SCOPE, GRADIENT, LOSS, OUTPUT, REPLICA, SUM
from unisono._src.typed_jax import eval_shape, map_tree, mark_value
from unisono._src.typing import Array, Logs, Outputs, PyTree, Values, is_traced

CallUserFunction: TypeAlias = Callable[[PyTree, Sequence[Array]], Outputs]
"""`call(batch, constants)` calls the user's function."""

ALL_ROWS = (
    "The function {name!r} is traced for the rows of a replica, and for all rows of the global batch: these say what metrics and the state of "
    "layers become."
)
FROM_ARGUMENTS = "Replica code must not fix the number of rows: take it from the arguments, as keras.ops.shape(images)[0], or write replicas=1."


class CodeRun(NamedTuple):
    """What one run of the code has left."""

    code: ReplicaCode
    outputs: list[Array]
    after: list[Values]
    """The values of the variables, in the groups of the state."""
    row_fraction: Array


class UserStep:
    """The step of a user function.

    Replicas compute gradients, outputs and what their own variables add up; the rest is that of all rows.
    """

    is_of_replicas = True
    returns_rows = False
    has_own_logs = True

    def __init__(
        self,
        name: str,
        call: CallUserFunction,
        variables: UsedVariables,
        replicas: int,
        is_own: Callable[[keras.Variable], bool],
        can_be_cut: bool,
        has_fixed_losses: bool,
    ) -> None:
        """Keep the function and its variables.

        Args:
            name: The name of the user's function.
            call: Calls the function.
            variables: The variables that it uses.
            replicas: R.
            is_own: Whether a variable is the user's own, of no layer.
            can_be_cut: Whether the code gets a batch's rows alone, and no values of an earlier step.
            has_fixed_losses: Whether a loss is an array whose shape is the same for any number of rows.
        """
        self.name = name
        self.call = call
        self._replicas = replicas
        self._can_be_cut = can_be_cut
        self._has_fixed_losses = has_fixed_losses
        self.variables = variables
        self.returned: PyTree = None
        """The tree that the code returns, with an `OutputLeaf` for each array."""
        self.fixed_divisors: list[tuple[float, int]] = []
        """The divisors that the code itself gives, each with the number of values that a row has in the divided loss."""
        self._own = OwnVariables(variables, is_own)

    def __call__(self, state: State, batch: PyTree, constants: Sequence[Array]) -> tuple[State, Logs]:
        """Trace (new state, logs), with marks on a replica's own values.

        The logs are the sums of the numbers that replicas return.
        """
        rows = count_batch_rows(batch)
        row_fraction = np.float32(rows) / see_whole_batch(rows)
        replica = mark_value(cast(Array, np.int32(0)), REPLICA)
        run = self.run(state, batch, constants, replica, row_fraction, divide_by_sum)
        for place, output in enumerate(run.outputs):
            mark_value(output, f"{OUTPUT} {place}")
        return self.finish(state, run, [mark_value(value, SUM) for value in self.list_summed(state, run)])

    @hide_masks()
    def run(
        self,
        state: State,
        batch: PyTree,
        constants: Sequence[Array],
        replica: Array,
        row_fraction: Array,
        find_divisor: FindDivisor,
    ) -> CodeRun:
        """Run the code once on some rows."""
        axes = self._find_axes(state, batch, constants)
        with self._open(state, batch, replica, row_fraction, find_divisor, axes) as code:
            outputs, self.returned = split_outputs(self.call(batch, constants), code)
        self.fixed_divisors = code.fixed_divisors
        after = [list(map(code.scope.left, *group)) for group in zip(self.variables.all, state, strict=True)]
        return CodeRun(code, outputs, after, row_fraction)

    def list_summed(self, state: State, run: CodeRun) -> list[Array]:
        """List what is added up over replicas. These are gradients, changes of variables, and numbers that are returned."""
        gradients = [
            widen_half_precision(gradient)
            for weight, gradient in zip(self._updated_weights, self._list_gradients(run.code), strict=True)
            if not weight.overwrite_with_gradient
        ]
        growths = self._own.list_parts(state[1], run.after[1], run.row_fraction)
        return [*gradients, *growths, *(widen_half_precision(output) for output in run.outputs if is_summed(output))]

    def finish(self, state: State, run: CodeRun, totals: Sequence[Array]) -> tuple[State, Logs]:
        """Compute (new state, logs) from a run on all rows. `totals` are the sums of `list_summed`."""
        left = iter(totals)
        of_batch = zip(self._updated_weights, self._list_gradients(run.code), strict=True)
        gradients = [
            mark_value(one if weight.overwrite_with_gradient else next(left), f"{GRADIENT} {place}")
            for place, (weight, one) in enumerate(of_batch)
        ]
        others = self._own.put_totals(state[1], run.after[1], [next(left) for _ in range(self._own.count)])
        logs = {str(place): next(left) for place, output in enumerate(run.outputs) if is_summed(output)}
        first = next(iter(logs), None)
        if first is not None:
            logs[first] = mark_value(logs[first], LOSS)
        weights, slots = optimizer_update.apply_all(self.variables, state, gradients)
        return (weights, others, slots, run.after[3]), logs

    def note_gathered(self, gathered: Sequence[tuple[str, int]]) -> None:
        """Report nothing. Replicas gather no rows, except in layers that are synchronized."""

    @contextlib.contextmanager
    def explain_rows(self, rows: int, batch_rows: int) -> Generator[None]:
        """Explain in errors that the code runs on all rows too."""
        try:
            yield
        except Exception as error:
            if self._replicas > 1:
                error.add_note(
                    f"{ALL_ROWS.format(name=self.name)} The error comes of {rows} rows, of a global batch of {batch_rows}. {FROM_ARGUMENTS}"
                )
            raise

    def note_other_programs(self, error: ValueError) -> NoReturn:
        """Refuse code whose trace differs for another number of rows."""
        raise ValueError(f"{ALL_ROWS.format(name=self.name)} {error} {FROM_ARGUMENTS}") from error

    def list_recorded(self) -> RecordedVariables:
        variables = self.variables
        state = [("weight", variables.weights), ("state", variables.non_trainable), ("optimizer", variables.slots)]
        return [("gradient", self._updated_weights), *state]

    def _find_axes(self, state: State, batch: PyTree, constants: Sequence[Array]) -> RowAxes:
        """Find out which losses have rows. Where that is open, the code is traced for twice the rows."""
        rows = count_batch_rows(batch)
        is_open = self._has_fixed_losses or (rows == 1 and any(map(is_traced, jax.tree.leaves(batch))))
        if not (is_open and self._can_be_cut):
            return RowAxes(rows)
        axes = RowAxes(2 * rows)

        def trace(state: State, batch: PyTree, constants: Sequence[Array]) -> None:
            with self._open(state, batch, jnp.int32(0), jnp.float32(1), divide_by_own, axes) as code:
                split_outputs(self.call(batch, constants), code)

        try:
            eval_shape(trace, state, describe_more_rows(batch), constants)
        except Exception:  # the code works for this number of rows alone
            return RowAxes(rows)
        return RowAxes(rows, axes.noted)

    @contextlib.contextmanager
    def _open(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, find_divisor: FindDivisor, axes: RowAxes
    ) -> Generator[ReplicaCode]:
        """Run the block as replica code, with the variables' values from `state`."""
        mapping = [
            pair
            for variables, group in zip(self.variables.all, state, strict=True)
            for pair in zip(variables, group, strict=True)
        ]
        code = ReplicaCode(ReplicaScope(mapping), replica, self._replicas, row_fraction, find_divisor)
        code.rows = count_batch_rows(batch)
        code.axes = axes
        code.scalers = find_loss_scalers(self.variables.applied_optimizers)
        code.begin()
        with run_as_replica(code, self.variables.metrics):
            yield code

    @property
    def _updated_weights(self) -> list[keras.Variable]:
        """The weights that optimizers update, optimizer by optimizer."""
        return [
            list_optimizer_weights(optimizer)[position]
            for optimizer, positions in self.variables.applied_optimizers
            for position in positions
        ]

    def _list_gradients(self, code: ReplicaCode) -> list[Array]:
        """List the gradients that the code applies, optimizer by optimizer."""
        by_optimizer = {id(update.optimizer): update.gradients for update in code.updates}
        return [
            by_optimizer[id(optimizer)][id(list_optimizer_weights(optimizer)[position])]
            for optimizer, positions in self.variables.applied_optimizers
            for position in positions
        ]


def see_whole_batch(number: float) -> Array:
    """Count this trace's rows, as the whole batch's trace counts them."""
    with jax.named_scope(BATCH_SCOPE):
        return mark_value(cast(Array, np.float32(number)), "unisono rows")


def divide_by_sum(place: int, divisor: float | Array) -> Array:
    """Mark the divisor as a sum over all replicas, in a trace."""
    return mark_value(cast(Array, np.float32(divisor)) if isinstance(divisor, int | float) else divisor, SUM)


def divide_by_own(place: int, divisor: float | Array) -> Array:
    """Convert the divisor, in code that has all rows."""
    return jnp.float32(divisor)


def describe_more_rows(batch: PyTree) -> PyTree:
    """Describe a batch with twice the rows, in shapes."""
    return map_tree(lambda a: jax.ShapeDtypeStruct((*(2 * length for length in a.shape[:1]), *a.shape[1:]), a.dtype), batch)


def find_loss_scalers(
    applied: list[tuple[keras.optimizers.Optimizer, list[int]]],
) -> dict[int, LossScaleOptimizer]:
    """Find the optimizers that scale losses, by the ids of weights."""
    return {
        id(list_optimizer_weights(optimizer)[position]): optimizer
        for optimizer, positions in applied
        if isinstance(optimizer, LossScaleOptimizer)
        for position in positions
    }
