"""Record what user code does while it is traced as a replica.

It also says what the code may do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, NoReturn, TypeVar

import keras
from keras import ops

from unisono._src.keras.private.instances import replace_methods
from unisono._src.keras.private.models import crop_by_slices
from unisono._src.keras.private.optimizers import (
    LossScaleOptimizer,
    check_known_variables,
    list_optimizer_weights,
    list_updated_ids,
)
from unisono._src.keras.private.trainer_state import ReadingScope
from unisono._src.keras.replica import refused_calls
from unisono._src.keras.replica.row_axes import RowAxes
from unisono._src.programs.private import jaxprs
from unisono._src.typing import AnyArray, Array, PyTree, UserFunction, UserObject, is_traced

T = TypeVar("T")

FindDivisor = Callable[[int, "float | Array"], Array]
"""Gives the divisor of the whole batch, from the number of the divisor and its value for the rows that the code has."""

ScaleLoss = Callable[[keras.optimizers.Optimizer, Array], Array]
"""The method `scale_loss` of an optimizer."""


class NotedArrays(NamedTuple):
    """An event in the code, with arrays of the trace."""

    kind: str
    """"share": a loss that is a replica's part of the global loss, or, with an `origin`, a sum of such losses; "loss": a loss that the code has
    scaled by itself; "vector": losses of examples, which the engine divides; "weights": their weights; "fed": what a mean was fed with; "update":
    the arguments of a user's metric; "given": what a layer or a loss was called with; "gave": what it returned; "derivatives": what
    `value_and_grad` returned; "gradients": what an optimizer was applied with."""
    arrays: PyTree
    origin: UserObject = None


class PendingUpdate(NamedTuple):
    """An optimizer to apply when all replicas have given their gradients."""

    optimizer: keras.optimizers.Optimizer
    gradients: dict[int, Array]
    """By the ids of the weights."""


class NotBuiltError(Exception):
    """An optimizer has to be built outside of the trace."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
        super().__init__("an optimizer is not built")
        self.optimizer = optimizer
        self.variables = variables


class ReplicaScope(ReadingScope):
    """The state of a replica. It remembers what is read and assigned; what is updated at the end of the step cannot be read."""

    def __init__(self, state_mapping: Sequence[tuple[keras.Variable, Array]] = ()) -> None:
        super().__init__(state_mapping, collect_losses=True)
        self.updated_ids: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Array | None:
        if id(variable) in self.updated_ids:
            raise ValueError(
                f"The replica's code reads {variable.path!r} after it was updated, but the update comes when all replicas have "
                f"given their gradients, at the end of strategy.run. Read it in a second run:\n\n"
                f"    @un.function\n    def step(batch):\n        strategy.run(update, args=(batch,))\n"
                f"        return strategy.run(read_what_was_updated, args=(batch,))"
            )
        return super().get_current_value(variable)

    def left(self, variable: keras.Variable, start: Array) -> Array:
        """The value of a variable after the code. `start` is its value before."""
        return self.state_mapping.get(id(variable), start)


class ReplicaCode:
    """One trace of user code."""

    def __init__(
        self, scope: ReplicaScope, replica: Array, replicas: int, row_fraction: Array, find_divisor: FindDivisor | None = None
    ) -> None:
        """Begin a record.

        `find_divisor` gives divisors of the global batch; None where losses are not divided, so that the code can be read.
        """
        self.scope = scope
        self.replica = replica
        self.replicas = replicas
        self.row_fraction = row_fraction
        self.divisors: list[float | Array] = []
        self.updates: list[PendingUpdate] = []
        self.fixed_divisors: list[tuple[float, int]] = []
        self.noted: list[NotedArrays] = []
        self.masks: list[Array] = []
        """Masks of the losses that were called. The engine divides by the number of values that a mask keeps."""
        self.inside = 0
        """How many calls of layers and losses are around the line that runs."""
        self.is_inspected = False
        """Whether mistakes are looked for in this trace: the operations of layers and metrics are then marked."""
        self.may_be_rows: Callable[[AnyArray], bool] = lambda array: False
        """Whether an array that is the same for all replicas may be rows from outside; asked in an inspected trace."""
        self.scales = False
        """Whether the engine is scaling a loss just now."""
        self.scaled_by_user = False
        self.scalers: dict[int, LossScaleOptimizer] = {}
        """For the ids of weights, the optimizer that scales their loss; known from an earlier trace."""
        self.changes_gradients = False
        """Whether an optimizer was applied with other gradients than `value_and_grad` gave."""
        self._find_divisor = find_divisor
        self._given_gradients: dict[int, Array] = {}
        self._scaled: dict[int, tuple[Array, keras.optimizers.Optimizer, Array]] = {}
        self._traces: list[object] = []
        """The functions that JAX is tracing and whose arrays can be handed out: the code, and what `value_and_grad` differentiates."""
        self.rows: int | None = None
        """The rows of this replica."""
        self.axes = RowAxes()
        """Which losses and values for means have rows, and which are numbers."""

    def begin(self) -> None:
        """Note that the code's own trace begins."""
        self._traces = [jaxprs.get_trace_state()]

    @contextlib.contextmanager
    def trace_gradients(self) -> Generator[None]:
        """Note that JAX traces a gradient in the block. `value_and_grad` differentiates there."""
        self._traces.append(jaxprs.get_trace_state())
        try:
            yield
        finally:
            self._traces.pop()

    def divided(self, numerator: Array, divisor: float | Array) -> Array:
        """Divide by the sum of all replicas' divisors."""
        place = len(self.divisors)
        self.divisors.append(divisor)
        return numerator if self._find_divisor is None else ops.divide_no_nan(numerator, self._find_divisor(place, divisor))

    def scaling(self, scale_loss: ScaleLoss) -> ScaleLoss:
        """Wrap `optimizer.scale_loss` to note its calls. The engine then does not scale the loss once more."""

        def scale_and_note(optimizer: keras.optimizers.Optimizer, loss: Array) -> Array:
            if isinstance(optimizer, LossScaleOptimizer) and not self.scales:
                self.scaled_by_user = True
            return scale_loss(optimizer, loss)

        return scale_and_note

    def note(self, kind: str, arrays: T, origin: object = None) -> T:
        """Note arrays, and return them. `value_and_grad` hands out what was noted inside of it."""
        if (self.is_inspected or kind == "update") and jaxprs.get_trace_state() in self._traces[-1:]:
            self.noted.append(NotedArrays(kind, arrays, origin))
        return arrays

    def find_scaler(self, variables: Sequence[keras.Variable]) -> LossScaleOptimizer | None:
        """Find the optimizer that scales the loss of these weights. None if there is none."""
        return next((self.scalers[id(variable)] for variable in variables if id(variable) in self.scalers), None)

    def note_gradients(self, gradients: Sequence[Array]) -> None:
        """Note what `value_and_grad` hands out."""
        self._given_gradients |= {id(gradient): gradient for gradient in gradients}
        self.note("derivatives", list(gradients))

    def keep_scaled_gradient(self, optimizer: keras.optimizers.Optimizer, gradient: Array, scaled: Array) -> None:
        """Keep a gradient's scaled form for the optimizer that scaled the loss. The code hands on the unscaled gradient."""
        self._scaled[id(gradient)] = gradient, optimizer, scaled

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Array | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Note the gradients of an `optimizer.apply`. They are summed over replicas, and applied once."""
        if jaxprs.get_trace_state() not in self._traces[:1]:
            raise ValueError(
                f"The replica's code applies the optimizer {optimizer.name!r} inside of a function that JAX traces by itself (of ops.cond, "
                f"ops.scan, jax.jit and the like), where the update would be made whatever the condition. Apply it outside, for example "
                f"gradients times ops.cast(condition, 'float32')."
            )
        gradients = list(grads)
        if not optimizer.built:
            if trainable_variables is None:
                raise ValueError(
                    "optimizer.apply received gradients without variables, and the optimizer is not built. Write "
                    "optimizer.apply(gradients, model.trainable_variables)."
                )
            raise NotBuiltError(optimizer, list(trainable_variables))
        variables = list_optimizer_weights(optimizer) if trainable_variables is None else list(trainable_variables)
        check_known_variables(optimizer, variables)
        if len(gradients) != len(variables):
            raise ValueError(f"optimizer.apply received {len(gradients)} gradients for {len(variables)} variables.")
        if any(update.optimizer is optimizer for update in self.updates):
            raise ValueError(
                f"The replica's code applies the optimizer {optimizer.name!r} twice, but one strategy.run makes one update of it. "
                f"Apply all gradients at once, or call strategy.run twice."
            )
        self.changes_gradients |= any(
            gradient is not None and id(gradient) not in self._given_gradients for gradient in gradients
        )
        applied = {
            id(variable): self._gradient_for(optimizer, gradient)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        }
        if not applied and variables:
            raise ValueError("optimizer.apply received no gradient: every one of them is None. Check what the loss depends on.")
        self.note("gradients", [gradient for gradient in gradients if is_traced(gradient)], origin=optimizer)
        self.updates.append(PendingUpdate(optimizer, applied))
        self.scope.updated_ids |= {id(variable) for variable in variables} | list_updated_ids(optimizer)

    def _gradient_for(self, optimizer: keras.optimizers.Optimizer, gradient: Array) -> Array:
        """The gradient that the optimizer gets. It is the scaled one, where the optimizer scales the loss."""
        if not isinstance(optimizer, LossScaleOptimizer) or self.scaled_by_user:
            return gradient
        kept = self._scaled.get(id(gradient))
        if kept is not None and kept[1] is optimizer:
            return kept[2]
        # The code has changed the gradient, or another optimizer has scaled the loss.
        return gradient * optimizer.dynamic_scale.value


class CurrentCode(threading.local):
    """The replica code that this thread runs."""

    def __init__(self) -> None:
        self.code: ReplicaCode | None = None


_current = CurrentCode()


def get_current_code() -> ReplicaCode | None:
    """The replica code that runs here. None outside of replica code."""
    return _current.code


@contextlib.contextmanager
def run_as_replica(code: ReplicaCode, metrics: Sequence[keras.metrics.Metric] = ()) -> Generator[ReplicaCode]:
    """Run the block as a replica's code, which feeds these metrics."""
    before = _current.code
    _current.code = code
    calls: dict[str, Callable[[UserFunction], UserFunction]] = {
        "apply": lambda _: code.apply,
        "stateless_apply": lambda _: refuse_stateless_apply,
        "scale_loss": code.scaling,
        "crop": crop_by_slices,
        **refused_calls.wrap_keras_calls(code),
    }
    try:
        with code.scope, replace_methods(calls), refused_calls.refuse_metric_reads(code, metrics):
            yield code
    finally:
        _current.code = before


def refuse_stateless_apply(*_: object, **__: object) -> NoReturn:
    raise ValueError(
        "Replica code calls optimizer.stateless_apply, which would apply one replica's gradients alone. Write "
        "optimizer.apply(gradients, variables): there the gradients of all replicas are summed first."
    )
