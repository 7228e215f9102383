"""A function of the user's, compiled for the replicas, over the variables that it uses."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from unisono import keras_seam
from unisono.data.division import GlobalBatch, Rows, global_batch
from unisono.errors import explained_loop
from unisono.loop.arguments import Arguments, Template, refuse_undistributed
from unisono.loop.closure import arrays_around, check_nothing_left, is_among
from unisono.loop.traces import check_collectives, constants_of, divisors_of_sums, has_float16
from unisono.loop.values import PerReplica
from unisono.placement import Placement, split_evenly
from unisono.replica.discovery import discover
from unisono.replica.own_code import Leaf, OwnCode
from unisono.replica.program import scaling_variables
from unisono.step.step import Output, Step


class Segment:
    """`segment(arguments)` runs the function on every replica, and leaves the new state in the variables."""

    def __init__(self, name: str, function: Callable[..., Any], template: Template, strategy: Any) -> None:
        self._function = function
        self._template = template
        self._strategy = strategy
        self._name = name
        self._step: Step | None = None
        self._code: OwnCode | None = None
        self._variables: list[list[Any]] = []
        self._divisors: set[int] = set()
        self._is_half = False
        self._most_rows = 0
        self._warned = False

    def __call__(self, arguments: Arguments) -> Any:
        placement: Placement = self._strategy.placement
        batch = batch_of(arguments, placement)
        constants = [as_constant(value) for value in arguments.constants]
        with explained_loop(self._name, batch):
            if self._step is None:
                self._step = self._made(batch, arguments, constants)
            step, code = self._step, self._code
            assert code is not None
            for optimizer in code.variables.optimizers:
                self._strategy.check_attributes(optimizer)
            state = tuple([unshared(v, step.holds) for v in group] for group in self._variables)
            try:
                totals, outputs = step.outputs(state, [batch], constants, arguments.carried)
            finally:
                self._leave(step)
        for shards in arguments.rows:
            shards.begun()
        if arguments.rows:
            self._compare(code.fixed_divisors, batch.rows)
        like = Rows(np.zeros(batch.rows, np.uint8), batch.position, batch.sizes)
        return self._returned(code.returned, like, totals, outputs)

    @property
    def used(self) -> frozenset[int]:
        """The ids of the variables that the function uses."""
        return frozenset(id(v) for group in self._variables for v in group)

    def _made(self, batch: GlobalBatch, arguments: Arguments, constants: list[Any]) -> Step:
        strategy, placement = self._strategy, self._strategy.placement
        sizes = batch.sizes or [len(part) for part in split_evenly(batch.rows, placement.replicas)]
        rows = next(size for size in sizes if size)
        shapes = batch.shapes(rows)
        if arguments.carried:
            shapes = shapes, [value.shapes(rows) for value in arguments.carried]
        like = [jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in constants]
        variables = discover(
            self._call,
            shapes,
            like,
            placement.replicas,
            lambda: strategy.owned.optimizers,
            lambda: strategy.owned.metrics,
            self._check,
        )
        self._code = OwnCode(self._call, variables, placement.replicas, can_be_cut=bool(arguments.rows) and not arguments.carried)
        self._variables = variables.all
        unscaled = [optimizer.name for optimizer, _ in variables.applied if not scaling_variables(optimizer)]
        if unscaled and self._is_half:
            warnings.warn(
                f"The function {self._name!r} computes in float16 and applies the optimizer {unscaled[0]!r}, which scales no loss: small "
                f"gradients become zero. fit wraps such an optimizer by itself; in a loop write "
                f"keras.optimizers.LossScaleOptimizer(optimizer).",
                stacklevel=6,
            )
        return Step(self._name, self._code, placement, strategy.exchange, most_steps=1)

    def _check(self, variables: list[Any], program: Any) -> None:
        """Before the function is compiled."""
        self._strategy.check_variables(variables)
        check_nothing_left(self._function)
        check_collectives(self._name, program)
        constants = constants_of(program)
        self._divisors, self._is_half = divisors_of_sums(program), has_float16(program)
        replicas = self._strategy.num_replicas_in_sync
        for name, array in arrays_around(self._function) if constants else []:
            if is_among(array, constants):
                refuse_undistributed(array, f"by the name {name!r}", replicas)

    def _call(self, batch: Any, constants: Any) -> Any:
        rows, carried = batch if isinstance(batch, tuple) else (batch, [])
        args, kwargs = self._template.filled(rows=rows, carried=carried, constants=constants)
        return self._function(*args, **kwargs)

    def _compare(self, sizes: Sequence[float], rows: int) -> None:
        """Says once that the code divides by another size of the global batch than this one's, as `sizes` have it, or as whole
        numbers that it divides sums by do where they were the rows of batches before."""
        self._most_rows = max(self._most_rows, rows)
        wrong = [s for s in sizes if s != rows] + [d for d in self._divisors if d == self._most_rows != rows]
        if wrong and not self._warned:
            self._warned = True
            warnings.warn(
                f"The function {self._name!r} divides a sum by {wrong[0]:.0f}, and this global batch has {rows} rows: its examples weigh "
                f"{rows}/{wrong[0]:.0f} of what those of other batches do. If that is not meant, return the loss of each example from the "
                f"function given to un.value_and_grad, or write un.compute_average_loss(losses) without global_batch_size: both divide by "
                f"the rows that there are.",
                stacklevel=5,
            )

    def _leave(self, step: Step) -> None:
        """The variables hold the newest state, also when a step was interrupted."""
        for variables, values in zip(self._variables, step.state, strict=False):
            for variable, value in zip(variables, values, strict=True):
                keras_seam.set_raw_value(variable, value)

    def _returned(self, tree: Any, like: Rows, totals: dict[str, Any], outputs: list[Output]) -> Any:
        placement = self._strategy.placement

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, Leaf):
                return leaf
            return PerReplica(placement, like, outputs, leaf.index, totals.get(str(leaf.index)))

        return jax.tree.map(value, tree, is_leaf=lambda leaf: isinstance(leaf, Leaf))


def unshared(variable: Any, held: Callable[[Any], int]) -> Any:
    """The variable's array, whose memory a step uses again; a copy where somebody else holds the array too."""
    value = keras_seam.raw_value(variable)
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
