"""A user function, compiled for the replicas, over the variables that it uses."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._src.checks.jax_errors import explain_run_errors, is_concretization_error
from unisono._src.checks.user_code.identity import VALUE_TYPES, IdentityKey
from unisono._src.checks.user_code.inspection import (
    TraceInputs,
    find_returned_shares,
    inspect_program,
    inspect_without_program,
    name_array_in_errors,
)
from unisono._src.checks.user_code.jaxpr import has_float16
from unisono._src.checks.user_code.loss_growth import LossPart, ReplicaRows, find_loss_parts
from unisono._src.checks.user_code.loss_scaling import DivisorCheck, LossScaling, is_additive
from unisono._src.checks.user_code.provenance import Provenance
from unisono._src.checks.user_code.row_independence import warn_of_coupled_rows
from unisono._src.checks.user_code.staleness import CaptureSnapshot
from unisono._src.checks.user_code.undistributed_arrays import make_suspicion
from unisono._src.data.global_batch import BatchArray, GlobalBatch, as_global_batch, count_shard_rows
from unisono._src.distributed.per_replica import PerReplica
from unisono._src.distributed.strategy_protocol import ReplicaStrategy
from unisono._src.keras_private.trainer_state import get_raw_value, set_raw_value
from unisono._src.loop import tf_names
from unisono._src.loop.run_arguments import ArgumentTemplate, RunArguments, refuse_changed_structure
from unisono._src.ownership import find_bond
from unisono._src.placement import Placement
from unisono._src.replica.compiled_model import list_loss_scales
from unisono._src.replica.user_function import OutputLeaf, UsedVariables, UserComputation
from unisono._src.replica.variable_discovery import Trace, discover_variables, trace_user_function
from unisono._src.step.eager import EagerStep
from unisono._src.step.plan import plan_batch
from unisono._src.step.step import RunOutput, Step
from unisono._src.typing import AnyArray, Array, Outputs, PyTree, UserFunction, UserObject


class CompiledFunction:
    """A user function on all replicas: a call with arguments runs it, and leaves the new state in the variables."""

    def __init__(
        self, name: str, function: UserFunction, template: ArgumentTemplate, strategy: ReplicaStrategy, eager: bool = False
    ) -> None:
        """Take a function that is compiled at its first call, or never where it is `eager`."""
        self._eager = eager
        self._function = function
        self._template = template
        self._strategy = strategy
        self._name = name
        self._step: Step | EagerStep | None = None
        self._code: UserComputation | None = None
        self._variables: list[list[keras.Variable]] = []
        self._divisions: DivisorCheck | None = None
        self._share_positions: frozenset[int] = frozenset()
        """Positions, among the arrays that the function returns, of shares of a loss."""
        self._surroundings = CaptureSnapshot(function)
        self._update_settings: list[object] | None = None
        self._was_traced = False

    def __call__(self, arguments: RunArguments) -> Outputs:
        placement = self._strategy.placement
        batch = find_global_batch(arguments, placement)
        constants = [as_constant(value) for value in arguments.constants]
        with explain_run_errors(self._name, batch, self._eager):
            if self._step is None:
                self._step = self._make_step(batch, arguments, constants)
            step = self._step
            code = self._code
            assert code is not None
            for optimizer in code.variables.optimizers:
                self._strategy.check_attributes(optimizer)
            state = tuple([copy_if_shared(v, step.count_references) for v in group] for group in self._variables)
            if self._eager:
                self._mark_models_eager()
            try:
                totals, outputs = step.outputs(state, [batch], constants, arguments.carried)
                outputs = [move_to_device(output, placement) for output in outputs] if self._eager else outputs
            finally:
                self._store_state(step)
        for shards in arguments.rows:
            shards.report_begun()
        if self._divisions is not None:
            self._divisions.check(batch, code.fixed_divisors, [read_host_number(value) for value in arguments.constants])
        if self._was_traced:  # a trace may change what the function uses, as code that counts its traces does
            self._surroundings = CaptureSnapshot(self._function, self._surroundings)
            self._update_settings = read_update_settings(code.variables)
            self._was_traced = False
        like = BatchArray(np.zeros(batch.rows, np.uint8), batch.position, batch.sizes)
        sizes = set(count_shard_rows(batch, placement.replicas)) - {0} if placement.processes else ()
        shapes = {size: step.output_shapes(batch, size) for size in sizes}
        return self._build_result(code.returned, like, totals, outputs, shapes)

    def _mark_models_eager(self) -> None:
        """Mark the models whose variables the function uses: their bits are not promised any more."""
        for model in self._strategy.owned.models:
            bond = find_bond(model)
            if bond is not None and any(id(v) in self.used for v in model.variables):
                bond.ran_eagerly = True

    @property
    def used(self) -> frozenset[int]:
        """Return the ids of the variables that the function uses."""
        return frozenset(id(v) for group in self._variables for v in group)

    @property
    def is_current(self) -> bool:
        """Return whether all that the trace took as fixed is unchanged: what the function finds by its names, frozen variables, and the
        settings of optimizers."""
        assert self._code is not None
        return self._surroundings.is_unchanged and self._update_settings == read_update_settings(self._code.variables)

    def _make_step(self, batch: GlobalBatch, arguments: RunArguments, constants: list[AnyArray]) -> Step | EagerStep:
        strategy = self._strategy
        placement = self._strategy.placement
        rows = next(size for size in count_shard_rows(batch, placement.replicas) if size)
        like = [jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in constants]
        with name_array_in_errors(self._function, placement.replicas):
            variables, seen = self._trace_and_inspect(batch, arguments, rows, like)
            if variables is None:
                variables = self._discover_eagerly(batch, arguments, rows, constants)
        if arguments.rows and seen is not None:
            self._divisions = self._find_divisions(seen, batch, arguments, rows, constants)
        can_be_cut = bool(arguments.rows) and not arguments.carried
        self._code = UserComputation(
            self._name, self._call_function, variables, placement.replicas, lambda: strategy.owned.layers, can_be_cut, self._eager
        )
        self._code.is_said = self._divisions is not None and self._divisions.has_fault
        self._variables = variables.all
        strategy.agree([v for group in variables.all for v in group])
        if seen is not None:
            self._warn_of_float16(seen, variables)
        if self._eager:
            strategy.warn_of_slow_steps(f"The function {self._name!r} is not compiled")
            return EagerStep(self._code, *strategy.on_lead)
        return Step(self._name, self._code, placement, strategy.exchange, most_steps=1)

    def _trace_and_inspect(
        self, batch: GlobalBatch, arguments: RunArguments, rows: int, constants: list[jax.ShapeDtypeStruct]
    ) -> tuple[UsedVariables | None, Trace | None]:
        """Trace the function and look for mistakes; return its variables and its trace, or (None, None) where it cannot be traced."""
        strategy = self._strategy
        seen: list[Trace] = []
        shares = [i for i, v in enumerate(arguments.carried, len(batch.leaves)) if v.is_share]
        can_be_traced = bool(arguments.rows) and not arguments.carried
        trace_of = self._make_tracer(batch, constants) if can_be_traced else None
        received = TraceInputs(batch.rows, rows, shares, bool(arguments.rows or arguments.carried), trace_of)
        shapes = batch.shapes(rows)
        if arguments.carried:
            shapes = shapes, [value.shapes(rows) for value in arguments.carried]

        def check(trace: Trace) -> None:
            seen.append(trace)
            inspect_program(self._name, self._function, trace, strategy, received)
            self._share_positions = find_returned_shares(trace, received)

        try:
            variables = self._discover(shapes, constants, check)
        except Exception as error:
            if not (self._eager and is_concretization_error(error)):
                raise
            return None, None
        return variables, seen[-1]

    def _discover_eagerly(
        self, batch: GlobalBatch, arguments: RunArguments, rows: int, constants: list[AnyArray]
    ) -> UsedVariables:
        """Return the variables that the function uses on the first replica's rows."""
        first = plan_batch(batch.rows, batch.sizes, self._strategy.placement).shards[0]
        given = jax.tree.unflatten(batch.structure, [jnp.asarray(leaf.array[:rows], leaf.dtype) for leaf in batch.leaves])
        if arguments.carried:
            given = given, [value.present[first.replica] for value in arguments.carried]

        def check(trace: Trace) -> None:
            inspect_without_program(self._function, trace, self._strategy)

        return self._discover(given, [jnp.asarray(constant) for constant in constants], check, eager=True)

    def _discover(
        self,
        batch: PyTree,
        constants: Sequence[Array | jax.ShapeDtypeStruct],
        check: Callable[[Trace], None],
        eager: bool = False,
    ) -> UsedVariables:
        owned = self._strategy.owned
        return discover_variables(
            self._call_function,
            batch,
            constants,
            self._strategy.num_replicas_in_sync,
            lambda: owned.optimizers,
            lambda: owned.metrics,
            check,
            make_suspicion(self._function, self._strategy.num_replicas_in_sync),
            eager,
        )

    def _find_divisions(
        self, seen: Trace, batch: GlobalBatch, arguments: RunArguments, rows: int, constants: list[AnyArray]
    ) -> DivisorCheck:
        """Return by what the function divides its losses, where its trace tells that."""
        replicas = self._strategy.num_replicas_in_sync
        can_be_told = not arguments.carried and bool(seen.noted.keys() & {"loss", "vector"})
        trace_of = self._make_tracer(batch, [jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in constants])
        parts: list[LossPart] = []
        if can_be_told and replicas > 1:
            mine = [np.asarray(leaf.array[:rows], leaf.dtype) for leaf in batch.leaves]
            parts = find_loss_parts(seen, trace_of, ReplicaRows(mine, constants))
            of_rows = [part for part in parts if part.of_rows]
            with_losses = bool(of_rows) and all(is_additive(part, replicas) for part in of_rows)
            warn_of_coupled_rows(self._name, seen, trace_of, rows, constants, with_losses)
        return DivisorCheck(
            self._name,
            replicas,
            parts,
            {rows: find_loss_scaling(seen)} if can_be_told else {},
            (lambda size: find_loss_scaling(trace_of(size))) if can_be_told else None,
        )

    def _make_tracer(self, batch: GlobalBatch, constants: list[jax.ShapeDtypeStruct]) -> Callable[[int], Trace]:
        """Return a call that traces the function on any number of rows."""
        again = functools.partial(
            trace_user_function, self._call_function, constants=constants, replicas=self._strategy.num_replicas_in_sync
        )
        return lambda size: again(batch.shapes(size), metrics=self._strategy.owned.metrics)

    def _warn_of_float16(self, seen: Trace, variables: UsedVariables) -> None:
        unscaled = [optimizer.name for optimizer, _ in variables.applied_optimizers if not list_loss_scales(optimizer)]
        if unscaled and has_float16(seen.program):
            warnings.warn(
                f"The function {self._name!r} computes in float16 and applies the optimizer {unscaled[0]!r}, which scales no loss: small "
                f"gradients become zero. fit wraps such an optimizer by itself; in a loop write "
                f"keras.optimizers.LossScaleOptimizer(optimizer).",
                stacklevel=7,
            )

    def _call_function(self, batch: PyTree, constants: Sequence[Array]) -> Outputs:
        rows, carried = batch if isinstance(batch, tuple) else (batch, [])
        self._was_traced = True
        args, kwargs = self._template.fill(rows=rows, carried=carried, constants=constants)
        before = jax.tree.structure((args, kwargs))
        function = self._function
        if isinstance(function, types.MethodType):
            function = getattr(
                function.__self__, function.__name__, function
            )  # the wrapped method, while a trace watches the instance
        with tf_names.NAMES:
            returned = function(*args, **kwargs)
        refuse_changed_structure(self._name, before, jax.tree.structure((args, kwargs)))
        return returned

    def _store_state(self, step: Step | EagerStep) -> None:
        """Put the newest state into the variables, also when a step was interrupted."""
        for variables, values in zip(self._variables, step.state, strict=False):
            for variable, value in zip(variables, values, strict=True):
                set_raw_value(variable, value)

    def _build_result(
        self,
        tree: PyTree,
        like: BatchArray,
        totals: dict[str, Array],
        outputs: list[RunOutput],
        shapes: dict[int, list[jax.ShapeDtypeStruct]],
    ) -> Outputs:
        """Return the tree that the function returned, with a `PerReplica` in place of each array."""
        placement = self._strategy.placement

        def wrap_leaf(leaf: object) -> object:
            if not isinstance(leaf, OutputLeaf):
                return leaf
            shapes_of_leaf = {size: structs[leaf.index] for size, structs in shapes.items()}
            total = totals.get(str(leaf.index))
            return PerReplica(placement, like, outputs, leaf.index, total, leaf.index in self._share_positions, shapes_of_leaf)

        return jax.tree.map(wrap_leaf, tree, is_leaf=lambda leaf: isinstance(leaf, OutputLeaf))


def move_to_device(output: RunOutput, placement: Placement) -> RunOutput:
    """Return the output, moved from the first device, where replicas ran, to the device where another run looks for it."""
    return output._replace(arrays=jax.device_put(output.arrays, placement.devices[output.device]))


def find_loss_scaling(trace: Trace) -> LossScaling:
    """Return by what the code itself divides the losses of a replica's rows."""
    sources = Provenance(trace.program, trace.arrays)
    noted = trace.noted
    losses = [loss for _, loss in noted.get("loss", [])]
    shares = [share for kind, share in noted.get("share", []) if kind is None]
    return LossScaling(
        [mean for loss in losses for mean in sources.means(loss, shares)],
        [(vector.aval.shape, sources.scaling(vector)) for _, vector in noted.get("vector", [])],  # pyright: ignore[reportAttributeAccessIssue]
    )


def read_update_settings(variables: UsedVariables) -> list[object]:
    """Return what decides, beside arrays, how weights are updated."""
    trained = [v.trainable for v in (*variables.weights, *variables.non_trainable)]
    scalers = [optimizer for optimizer in variables.optimizers if isinstance(optimizer, keras.optimizers.LossScaleOptimizer)]
    return [trained, *(read_settings(optimizer) for optimizer in [*variables.optimizers, *(scaler.inner_optimizer for scaler in scalers)])]


def read_settings(optimizer: keras.optimizers.Optimizer) -> dict[str, object]:
    """Return an optimizer's attributes: numbers and texts as they are, and everything else by identity."""
    return {
        name: value if value is None or isinstance(value, VALUE_TYPES) else IdentityKey(value) for name, value in vars(optimizer).items()
    }


def copy_if_shared(variable: keras.Variable, count_own: Callable[[Array], int]) -> Array:
    """Return the variable's array, whose memory a step uses again; a copy where somebody else holds the array too."""
    value = get_raw_value(variable)
    ours = 3 + count_own(value)  # the variable, this name, the argument of getrefcount
    return value.copy() if sys.getrefcount(value) > ours else value


def find_global_batch(arguments: RunArguments, placement: Placement) -> GlobalBatch:
    """Return the global batch of the arguments; without one, the batch that their carried values were made of, or a row for each replica."""
    for value in [*arguments.rows, *arguments.carried]:
        if value.placement.replicas != placement.replicas:
            raise ValueError(
                f"strategy.run received a batch of a dataset that was distributed to {value.placement.replicas} replicas, and has "
                f"{placement.replicas}. Distribute the dataset by the strategy that runs it."
            )
    if arguments.rows:
        counts = {shards.shape[0] for shards in arguments.rows}
        if len(counts) > 1:
            raise ValueError(
                f"strategy.run received arrays of {' and '.join(map(str, sorted(counts)))} rows, from different global batches. Give it "
                f"batches of one number of rows, for example by zipping the datasets before distributing them."
            )
        return as_global_batch(list(arguments.rows))
    like = arguments.carried[0].like if arguments.carried else BatchArray(np.zeros(placement.replicas, np.uint8))
    return as_global_batch([like])


def as_constant(value: UserObject) -> AnyArray:
    return value if isinstance(value, jax.Array) else np.asarray(value)


def read_host_number(value: UserObject) -> float | None:
    """Return a number that is known without asking a device; None for every other value."""
    return None if isinstance(value, jax.Array) or np.ndim(value) else float(value)
