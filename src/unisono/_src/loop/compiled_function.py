"""A function of the user's, compiled for the replicas, over the variables that it uses."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src import keras_private
from unisono._src.checks.jax_errors import explained_loop, needs_values
from unisono._src.checks.user_code.inspection import Received, inspect, inspect_used, naming, shares_among_returned
from unisono._src.checks.user_code.jaxpr import has_float16
from unisono._src.checks.user_code.loss_growth import Part, ReplicaRows, parts_of_losses
from unisono._src.checks.user_code.loss_scaling import Divisions, Scaled, adds_up
from unisono._src.checks.user_code.provenance import Sources
from unisono._src.checks.user_code.row_independence import warn_if_coupled
from unisono._src.checks.user_code.staleness import Surroundings
from unisono._src.checks.user_code.undistributed_arrays import suspicion
from unisono._src.data.global_batch import GlobalBatch, Rows, global_batch, sizes_of
from unisono._src.distributed.per_replica import PerReplica
from unisono._src.loop import tf_names
from unisono._src.loop.run_arguments import Arguments, Template, check_arguments
from unisono._src.placement import Placement
from unisono._src.replica.compiled_model import scaling_variables
from unisono._src.replica.user_function import Leaf, OwnCode, Variables
from unisono._src.replica.variable_discovery import Trace, discover, trace
from unisono._src.step.eager import EagerStep
from unisono._src.step.plan import plan
from unisono._src.step.step import Output, Step


class Segment:
    """`segment(arguments)` runs the function on every replica, and leaves the new state in the variables."""

    def __init__(self, name: str, function: Callable[..., Any], template: Template, strategy: Any, eager: bool = False) -> None:
        """`eager`: whether the function is not compiled."""
        self._eager = eager
        self._function = function
        self._template = template
        self._strategy = strategy
        self._name = name
        self._step: Step | EagerStep | None = None
        self._code: OwnCode | None = None
        self._variables: list[list[Any]] = []
        self._divisions: Divisions | None = None
        self._shares: frozenset[int] = frozenset()
        """Which of the arrays that the function returns are shares of a loss."""
        self._around = Surroundings(function)
        self._settings: Any = None
        self._was_traced = False

    def __call__(self, arguments: Arguments) -> Any:
        placement: Placement = self._strategy.placement
        batch = batch_of(arguments, placement)
        constants = [as_constant(value) for value in arguments.constants]
        with explained_loop(self._name, batch, self._eager):
            if self._step is None:
                self._step = self._made(batch, arguments, constants)
            step, code = self._step, self._code
            assert code is not None
            for optimizer in code.variables.optimizers:
                self._strategy.check_attributes(optimizer)
            state = tuple([unshared(v, step.holds) for v in group] for group in self._variables)
            if self._eager:
                self._note_unpromised()
            try:
                totals, outputs = step.outputs(state, [batch], constants, arguments.carried)
                outputs = [on_its_device(output, placement) for output in outputs] if self._eager else outputs
            finally:
                self._leave(step)
        for shards in arguments.rows:
            shards.begun()
        if self._divisions is not None:
            self._divisions.check(batch, code.fixed_divisors, [number_of(value) for value in arguments.constants])
        if self._was_traced:  # and has changed by itself what it then found, as code that counts its traces does
            self._around, self._settings, self._was_traced = (
                Surroundings(self._function, self._around),
                settings(code.variables),
                False,
            )
        like = Rows(np.zeros(batch.rows, np.uint8), batch.position, batch.sizes)
        sizes = set(sizes_of(batch, placement.replicas)) - {0} if placement.processes else ()
        shapes = {size: step.output_shapes(batch, size) for size in sizes}
        return self._returned(code.returned, like, totals, outputs, shapes)

    def _note_unpromised(self) -> None:
        """Of the models whose variables the function uses."""
        for model in self._strategy.owned.models:
            bond = keras_private.bond_of(model)
            if bond is not None and any(id(v) in self.used for v in model.variables):
                bond.ran_eagerly = True

    @property
    def used(self) -> frozenset[int]:
        """The ids of the variables that the function uses."""
        return frozenset(id(v) for group in self._variables for v in group)

    @property
    def is_current(self) -> bool:
        """Whether nothing has changed that was taken as it was when the function was traced: what it finds by its names, what is frozen,
        the settings of optimizers."""
        assert self._code is not None
        return self._around.unchanged and self._settings == settings(self._code.variables)

    def _made(self, batch: GlobalBatch, arguments: Arguments, constants: list[Any]) -> Step | EagerStep:
        strategy, placement = self._strategy, self._strategy.placement
        rows = next(size for size in sizes_of(batch, placement.replicas) if size)
        like = [jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in constants]
        with naming(self._function, placement.replicas):
            variables, seen = self._looked_at(batch, arguments, rows, like)
            if variables is None:
                variables = self._tried(batch, arguments, rows, constants)
        if arguments.rows and seen is not None:
            self._divisions = self._divisions_of(seen, batch, arguments, rows, constants)
        can_be_cut = bool(arguments.rows) and not arguments.carried
        self._code = OwnCode(
            self._name, self._call, variables, placement.replicas, lambda: strategy.owned.layers, can_be_cut, self._eager
        )
        self._code.is_said = self._divisions is not None and self._divisions.tells
        self._variables = variables.all
        strategy.agree([v for group in variables.all for v in group])
        if seen is not None:
            self._warn_of_float16(seen, variables)
        if self._eager:
            strategy.say_that_it_is_slow(f"The function {self._name!r} is not compiled")
            return EagerStep(self._code, *strategy.on_lead)
        return Step(self._name, self._code, placement, strategy.exchange, most_steps=1)

    def _looked_at(
        self, batch: GlobalBatch, arguments: Arguments, rows: int, constants: list[Any]
    ) -> tuple[Variables | None, Trace | None]:
        """(the variables that the function uses, its trace), which is looked at for mistakes; nothing of one that cannot be traced."""
        strategy, seen = self._strategy, []
        shares = [i for i, v in enumerate(arguments.carried, len(batch.leaves)) if v.is_share]
        can_be_traced = bool(arguments.rows) and not arguments.carried
        trace_of = self._trace_of(batch, constants) if can_be_traced else None
        received = Received(batch.rows, rows, shares, bool(arguments.rows or arguments.carried), trace_of)
        shapes = batch.shapes(rows)
        if arguments.carried:
            shapes = shapes, [value.shapes(rows) for value in arguments.carried]

        def check(trace: Trace) -> None:
            seen.append(trace)
            inspect(self._name, self._function, trace, strategy, received)
            self._shares = shares_among_returned(trace, received)

        try:
            variables = self._discovered(shapes, constants, check)
        except Exception as error:
            if not (self._eager and needs_values(error)):
                raise
            return None, None
        return variables, seen[-1]

    def _tried(self, batch: GlobalBatch, arguments: Arguments, rows: int, constants: list[Any]) -> Variables:
        """The variables that the function uses on the first replica's rows."""
        first = plan(batch.rows, batch.sizes, self._strategy.placement).shards[0]
        given = jax.tree.unflatten(batch.structure, [jnp.asarray(leaf.array[:rows], leaf.dtype) for leaf in batch.leaves])
        if arguments.carried:
            given = given, [value.present[first.replica] for value in arguments.carried]

        def check(trace: Trace) -> None:
            inspect_used(self._function, trace, self._strategy)

        return self._discovered(given, [jnp.asarray(constant) for constant in constants], check, eager=True)

    def _discovered(self, batch: Any, constants: list[Any], check: Callable[[Trace], None], eager: bool = False) -> Variables:
        owned = self._strategy.owned
        return discover(
            self._call,
            batch,
            constants,
            self._strategy.num_replicas_in_sync,
            lambda: owned.optimizers,
            lambda: owned.metrics,
            check,
            suspicion(self._function, self._strategy.num_replicas_in_sync),
            eager,
        )

    def _divisions_of(self, seen: Trace, batch: GlobalBatch, arguments: Arguments, rows: int, constants: list[Any]) -> Divisions:
        replicas = self._strategy.num_replicas_in_sync
        can_be_told = not arguments.carried and bool(seen.noted.keys() & {"loss", "vector"})
        trace_of = self._trace_of(batch, [jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in constants])
        parts: list[Part] = []
        if can_be_told and replicas > 1:
            mine = [np.asarray(leaf.array[:rows], leaf.dtype) for leaf in batch.leaves]
            parts = parts_of_losses(seen, trace_of, ReplicaRows(mine, constants))
            of_rows = [part for part in parts if part.of_rows]
            with_losses = bool(of_rows) and all(adds_up(part, replicas) for part in of_rows)
            warn_if_coupled(self._name, seen, trace_of, rows, constants, with_losses)
        return Divisions(
            self._name,
            replicas,
            parts,
            {rows: scaled(seen)} if can_be_told else {},
            (lambda size: scaled(trace_of(size))) if can_be_told else None,
        )

    def _trace_of(self, batch: GlobalBatch, constants: list[Any]) -> Callable[[int], Trace]:
        """Traces the function on any number of rows."""
        again = functools.partial(trace, self._call, constants=constants, replicas=self._strategy.num_replicas_in_sync)
        return lambda size: again(batch.shapes(size), metrics=self._strategy.owned.metrics)

    def _warn_of_float16(self, seen: Trace, variables: Variables) -> None:
        unscaled = [optimizer.name for optimizer, _ in variables.applied if not scaling_variables(optimizer)]
        if unscaled and has_float16(seen.program):
            warnings.warn(
                f"The function {self._name!r} computes in float16 and applies the optimizer {unscaled[0]!r}, which scales no loss: small "
                f"gradients become zero. fit wraps such an optimizer by itself; in a loop write "
                f"keras.optimizers.LossScaleOptimizer(optimizer).",
                stacklevel=7,
            )

    def _call(self, batch: Any, constants: Any) -> Any:
        rows, carried = batch if isinstance(batch, tuple) else (batch, [])
        self._was_traced = True
        args, kwargs = self._template.filled(rows=rows, carried=carried, constants=constants)
        before, function = jax.tree.structure((args, kwargs)), self._function
        if isinstance(function, types.MethodType):
            function = getattr(function.__self__, function.__name__, function)  # as it is while it is watched
        with tf_names.NAMES:
            returned = function(*args, **kwargs)
        check_arguments(self._name, before, jax.tree.structure((args, kwargs)))
        return returned

    def _leave(self, step: Step | EagerStep) -> None:
        """The variables hold the newest state, also when a step was interrupted."""
        for variables, values in zip(self._variables, step.state, strict=False):
            for variable, value in zip(variables, values, strict=True):
                keras_private.set_raw_value(variable, value)

    def _returned(self, tree: Any, like: Rows, totals: dict[str, Any], outputs: list[Output], shapes: dict[int, Any]) -> Any:
        placement = self._strategy.placement

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, Leaf):
                return leaf
            of_sizes = {size: of[leaf.index] for size, of in shapes.items()}
            total = totals.get(str(leaf.index))
            return PerReplica(placement, like, outputs, leaf.index, total, leaf.index in self._shares, of_sizes)

        return jax.tree.map(value, tree, is_leaf=lambda leaf: isinstance(leaf, Leaf))


def on_its_device(output: Output, placement: Placement) -> Output:
    """What replicas returned that ran on the first device, where another run looks for it."""
    return output._replace(arrays=jax.device_put(output.arrays, placement.devices[output.device]))


def scaled(of: Trace) -> Scaled:
    """What the code makes by itself of the losses of a replica's rows."""
    sources, noted = Sources(of.program, of.arrays), of.noted
    losses = [loss for _, loss in noted.get("loss", [])]
    shares = [share for kind, share in noted.get("share", []) if kind is None]
    return Scaled(
        [mean for loss in losses for mean in sources.means(loss, shares)],
        [(vector.aval.shape, sources.scaling(vector)) for _, vector in noted.get("vector", [])],
    )


def settings(variables: Variables) -> list[Any]:
    """What decides, beside arrays, how weights are updated."""
    trained = [v.trainable for v in (*variables.weights, *variables.others)]
    return [trained, *(keras_private.settings_of(optimizer) for optimizer in variables.optimizers)]


def unshared(variable: Any, held: Callable[[Any], int]) -> Any:
    """The variable's array, whose memory a step uses again; a copy where somebody else holds the array too."""
    value = keras_private.raw_value(variable)
    ours = 3 + held(value)  # the variable, this name, the argument of getrefcount
    return value.copy() if sys.getrefcount(value) > ours else value


def batch_of(arguments: Arguments, placement: Placement) -> GlobalBatch:
    """The global batch of the arguments; where there is none, a row for each replica, or what made the values that it gets."""
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
        return global_batch(list(arguments.rows))
    like = arguments.carried[0].like if arguments.carried else Rows(np.zeros(placement.replicas, np.uint8))
    return global_batch([like])


def as_constant(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(value)


def number_of(value: Any) -> float | None:
    """A number that is known without asking a device."""
    return None if isinstance(value, jax.Array) or np.ndim(value) else float(value)
