"""Compile a user function to a step.

It is traced, the trace is checked, and the variables that it uses are found.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._src.engine.global_batch import GlobalBatch, count_shard_rows
from unisono._src.engine.row_counts import unwrap_batch
from unisono._src.engine.step.plan import plan_batch
from unisono._src.keras.checks.jax_errors import is_concretization_error
from unisono._src.keras.checks.user_code.captured_arrays import refuse_compiled_captures
from unisono._src.keras.checks.user_code.captures import Capture
from unisono._src.keras.checks.user_code.fed_means import check_earlier_shares, check_fed_means
from unisono._src.keras.checks.user_code.gradient_growth import find_gradient_fault, warn_of_gradients
from unisono._src.keras.checks.user_code.inspected_code import InspectedCode
from unisono._src.keras.checks.user_code.inspection import find_returned_shares, inspect_program, name_array_in_errors
from unisono._src.keras.checks.user_code.jaxpr import has_float16
from unisono._src.keras.checks.user_code.loss_growth import compare_traces, find_loss_parts, warn_of_coupled_rows
from unisono._src.keras.checks.user_code.loss_scaling import DivisorCheck, find_vector_losses, is_additive
from unisono._src.keras.checks.user_code.provenance import Provenance
from unisono._src.keras.checks.user_code.undistributed_arrays import make_suspicion
from unisono._src.keras.cut_weights import refuse_nothing_cut
from unisono._src.keras.distributed.replica_strategy import ReplicaStrategy
from unisono._src.keras.loop import tf_names
from unisono._src.keras.loop.run_arguments import ArgumentLeaves, ArgumentTemplate, RunArguments
from unisono._src.keras.private.optimizers import list_loss_scales
from unisono._src.keras.replica.used_variables import UsedVariables
from unisono._src.keras.replica.user_function import UserStep
from unisono._src.keras.replica.variable_discovery import Trace, discover_variables, trace_user_function
from unisono._src.keras.steps.make_step import LoopSteps, make_step
from unisono._src.keras.steps.model_step import mark_layers
from unisono._src.old_objects import spare_old_objects
from unisono._src.programs.operands import get_shape
from unisono._src.typing import Array, Outputs, PyTree, Shape, UserFunction


class UserCall:
    """A user function, called with arrays in its arguments' places."""

    def __init__(
        self, name: str, function: UserFunction, template: ArgumentTemplate, layers: Callable[[], Sequence[keras.Layer]]
    ) -> None:
        """Keep the function. `layers` gives the layers that it may call."""
        self.name = name
        self._find_layers = layers
        self.function = function
        self._template = template
        self.was_called = False
        """Whether Python has run the function since this was set to False."""

    def find_captures(self) -> list[Capture]:
        """Find what the function captures. That includes what it finds in the objects among its arguments."""
        return self._template.find_captures(self.function)

    def __call__(self, batch: PyTree, constants: Sequence[Array]) -> Outputs:
        """Call the function. `batch` is the rows, or (rows, carried values)."""
        self.was_called = True
        rows, carried = batch if isinstance(batch, tuple) else (batch, [])
        args, kwargs = self._template.fill(rows=unwrap_batch(rows), carried=carried, constants=constants)
        before = ArgumentLeaves(self.function, (args, kwargs))
        function = self.function
        if isinstance(function, types.MethodType):  # the wrapped method, while a trace watches the instance
            function = getattr(function.__self__, function.__name__, function)
        with tf_names.NAMES, mark_layers(self._find_layers()):
            returned = function(*args, **kwargs)
        before.refuse_changes()
        return returned


class CompiledStep(NamedTuple):
    """The step of a user function, and what its trace has shown."""

    step: LoopSteps
    code: UserStep
    divisor_check: DivisorCheck | None
    share_positions: frozenset[int]
    """Positions, among the arrays that the function returns, of shares of a loss."""


class FunctionCompiler:
    """The compilation of a user function for one kind of arguments. It sees the first such arguments."""

    def __init__(
        self, call: UserCall, arguments: RunArguments, batch: GlobalBatch, strategy: ReplicaStrategy, eager: bool
    ) -> None:
        self._call = call
        self._arguments = arguments
        self._batch = batch
        self._strategy = strategy
        self._eager = eager
        self._replicas = strategy.num_replicas_in_sync
        self._rows = next(size for size in count_shard_rows(batch, self._replicas) if size)
        """The rows of the first replica that has any."""
        self._constant_shapes = [
            jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True))
            for array in arguments.constants
        ]
        self._has_only_rows = bool(arguments.rows) and not arguments.carried and not batch.is_whole
        self._share_positions: frozenset[int] = frozenset()
        self._traces: dict[int, Provenance] = {}
        self._loss_shapes: dict[int, list[Shape]] = {}
        """The shapes of losses for the replica's rows and for twice the rows, where one of them is the same for both."""

    @spare_old_objects()
    def compile(self) -> CompiledStep:
        """Compile the step, after checks.

        A function that would silently train something else is refused; of one that may, it warns.
        """
        strategy = self._strategy
        captures = self._call.find_captures()
        with name_array_in_errors(captures, self._replicas):
            variables = None
            sources = None
            try:
                variables, sources = self._discover(captures, call=False)
            except Exception as error:
                if not (self._eager and is_concretization_error(error)):
                    raise
            if variables is None:
                variables, _ = self._discover(captures, call=True)
        divisor_check = self._check_losses(sources) if self._arguments.rows and sources is not None else None
        in_layers = strategy.owned.layer_variable_ids
        code = UserStep(
            self._call.name,
            self._call,
            variables,
            self._replicas,
            lambda variable: id(variable) not in in_layers,
            self._has_only_rows,
            bool(self._loss_shapes),
        )
        strategy.agree([v for group in variables.all for v in group])
        if sources is not None:
            self._warn_of_float16(sources, variables)
        trains = bool(variables.applied_optimizers)
        if trains:
            refuse_nothing_cut(repr(self._call.name), variables.trained, variables.frozen, strategy)
        if self._eager:
            strategy.warn_of_slow_steps(f"The function {self._call.name!r} is not compiled")
        step = make_step(
            strategy,
            self._call.name,
            code,
            trains=trains,
            eager=self._eager,
            most_steps=1,
            verifies=not self._arguments.carried,  # the values of an earlier run lie where their replicas ran
            fixed_digest=self._arguments.digest_numbers(),
        )
        return CompiledStep(step, code, divisor_check, self._share_positions)

    def _discover(self, captures: list[Capture], call: bool) -> tuple[UsedVariables, Provenance | None]:
        """Find the function's variables, and trace and inspect it.

        `call`: Python calls the function on the first replica's rows, since it cannot be traced. There is then no trace to
        return.
        """
        batch = self._batch
        owned = self._strategy.owned
        carried = self._arguments.carried
        traces: list[Provenance] = []

        def check(trace: Trace) -> None:
            self._strategy.check_variables(trace.used, list(trace.code.scope.assigned.values()))
            captures = self._call.find_captures()  # the trace may have put something there
            if call:
                refuse_compiled_captures(captures)
                return
            traces.append(self._tell_numbers(Provenance(trace)))
            shares = [position for position, value in enumerate(carried, len(batch.leaves)) if value.is_share]
            has_rows = bool(self._arguments.rows or carried)
            trace_of = self._trace_rows if self._has_only_rows else None
            code = InspectedCode(
                self._call.name, traces[-1], captures, self._strategy, batch.rows, self._rows, shares, has_rows, trace_of
            )
            inspect_program(code)
            check_earlier_shares(code)
            self._share_positions = find_returned_shares(code)

        if call:
            first = plan_batch(batch.rows, batch.sizes, self._strategy.placement).shards[0]
            rows = jax.tree.unflatten(batch.structure, list(map(jnp.asarray, self._read_rows())))
            values = [value.present[first.replica] for value in carried]
            constants = list(map(jnp.asarray, self._arguments.constants))
        else:
            rows = batch.shapes(self._rows)
            values = [value.shapes(self._rows) for value in carried]
            constants = self._constant_shapes
        variables = discover_variables(
            self._call,
            (rows, values) if carried else rows,
            constants,
            self._replicas,
            lambda: owned.optimizers,
            lambda: owned.metrics,
            check,
            make_suspicion(captures, self._replicas),
            eager=call,
        )
        return variables, traces[-1] if traces else None

    def _read_rows(self) -> list[np.ndarray]:
        """Read the first replica's rows of each array of the batch."""
        return [np.asarray(leaf.array[: self._rows], leaf.dtype) for leaf in self._batch.leaves]

    def _trace_rows(self, rows: int) -> Provenance:
        """Trace the function on this number of rows. Its variables are known."""
        if rows not in self._traces:
            metrics = self._strategy.owned.metrics
            others = next((shapes for other, shapes in self._loss_shapes.items() if other != rows), None)
            given = self._call, self._batch.shapes(rows), self._constant_shapes, self._replicas, metrics, others
            self._traces[rows] = Provenance(trace_user_function(*given))
        return self._traces[rows]

    def _tell_numbers(self, sources: Provenance) -> Provenance:
        """Choose the trace in which losses of fixed shape are numbers.

        It is the given trace if no loss with axes has one size for any number of rows.
        """
        gave = set(sources.list_noted("gave"))
        losses = [*sources.list_noted("vector"), *sources.list_noted("divided")]
        if not self._has_only_rows or all(loss in gave and get_shape(loss)[:1] == (self._rows,) for loss in losses):
            return sources
        once = sources.trace.code.axes.noted
        try:
            twice = self._trace_rows(2 * self._rows).trace.code.axes.noted
        except Exception:  # of the user's code, which was not written for more rows
            return sources
        if len(once) != len(twice) or all(shape != other for shape, other in zip(once, twice, strict=True) if shape):
            return sources
        self._loss_shapes = {self._rows: once, 2 * self._rows: twice}
        self._traces.clear()
        return self._trace_rows(self._rows)

    def _check_losses(self, sources: Provenance) -> DivisorCheck:
        """Build the check of the function's divisors. It knows them as far as the trace shows them."""
        if not self._has_only_rows:
            return DivisorCheck(self._call.name, self._replicas)
        both = compare_traces(sources, self._trace_rows, self._rows)
        parts = find_loss_parts(sources, both, self._rows, self._replicas)
        if len(sources.gradient_scalings) == 1:  # it scales all gradients, which is the same as scaling the losses
            (scaling,) = sources.gradient_scalings
            parts = [part._replace(path=part.path.join(scaling)) for part in parts]
        if self._replicas > 1 and both is not None:
            check_fed_means(both, self._replicas, self._batch.rows, self._rows)
            of_rows = [part for part in parts if part.of_rows]
            is_open = all(part.growth is None or is_additive(part, self._replicas) for part in of_rows)
            warn_of_coupled_rows(self._call.name, both, of_rows if is_open else ())
            fault = find_gradient_fault(both, self._replicas) if sources.trace.code.changes_gradients and is_open else None
            if fault is not None:
                warn_of_gradients(self._call.name, fault, self._replicas)
        vectors = find_vector_losses(sources)
        gradients = sources.gradient_scalings
        return DivisorCheck(self._call.name, self._replicas, parts, vectors, sources.mean_scalings, gradients)

    def _warn_of_float16(self, sources: Provenance, variables: UsedVariables) -> None:
        unscaled = [optimizer.name for optimizer, _ in variables.applied_optimizers if not list_loss_scales(optimizer)]
        if unscaled and has_float16(sources.program):
            warnings.warn(
                f"The function {self._call.name!r} computes in float16 and applies the optimizer {unscaled[0]!r}, which scales no loss: small "
                f"gradients become zero. fit wraps such an optimizer by itself; in a loop write "
                f"keras.optimizers.LossScaleOptimizer(optimizer).",
                stacklevel=6,
            )
