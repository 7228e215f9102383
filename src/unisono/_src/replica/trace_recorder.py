"""Code of the user's while it is traced as a replica: what it may do, and what it has done."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.core import Tracer
from keras import ops

from unisono._src import keras_private
from unisono._src.replica import refused_calls
from unisono._src.xla import tracing


class Noted(NamedTuple):
    """Something that the code did on the way, with arrays of the trace."""

    kind: str
    """"share": a loss that is a replica's part of the global one, or, with an `of`, a sum of such; "loss": one that the code has scaled
    by itself; "vector": those of examples, which the engine divides; "fed": what a mean was fed with; "update": the arguments of a
    metric of the user's; "given": what a layer or a loss was called with; "gave": what it returned; "gradients": what an optimizer was applied
    with."""
    arrays: Any
    of: Any = None


class Update(NamedTuple):
    """An optimizer that is to be applied, when all replicas have given their gradients."""

    optimizer: Any
    gradients: dict[int, Any]
    """By the ids of the weights."""


class NotBuiltError(Exception):
    """An optimizer has to be built outside of the trace."""

    def __init__(self, optimizer: Any, variables: list[Any]) -> None:
        super().__init__("an optimizer is not built")
        self.optimizer, self.variables = optimizer, variables


class ReplicaScope(keras_private.ReadingScope):
    """The state of a replica: what is read and assigned is remembered, and what is updated in the end cannot be read."""

    def __init__(self, state_mapping: Sequence[tuple[Any, Any]] = ()) -> None:
        super().__init__(state_mapping, collect_losses=True)
        self.updated: set[int] = set()

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) in self.updated:
            raise ValueError(
                f"The replica's code reads {variable.path!r} after it was updated, but the update comes when all replicas have "
                f"given their gradients, at the end of strategy.run. Read it in a second run:\n\n"
                f"    @un.function\n    def step(batch):\n        strategy.run(update, args=(batch,))\n"
                f"        return strategy.run(read_what_was_updated, args=(batch,))"
            )
        return super().get_current_value(variable)

    def left(self, variable: Any, start: Any) -> Any:
        """The value that the code leaves in a variable that had `start`."""
        return self.state_mapping.get(id(variable), start)


class ReplicaCode:
    """One trace of the user's code."""

    def __init__(self, scope: ReplicaScope, replica: Any, replicas: int, share: Any, totals: Any) -> None:
        """`totals` are the global divisors, in the order in which the code asks for them; None while they are counted."""
        self.scope = scope
        self.replica = replica
        self.replicas = replicas
        self.share_of_rows = share
        self.divisors: list[Any] = []
        self.updates: list[Update] = []
        self.fixed_divisors: list[tuple[float, int]] = []
        self.noted: list[Noted] = []
        self.masks: list[Any] = []
        """Of the losses that were called: by what is left of a mask the engine divides."""
        self.inside = 0
        """How many calls of layers and losses are around the line that runs."""
        self.is_looked_at = False
        """Whether this is the trace in which mistakes are looked for: there, what layers and metrics compute is marked."""
        self.suspicion: Callable[[Any], bool] = lambda array: False
        """Whether an array that is the same for all may be rows from outside; asked where the code is looked at."""
        self.scales = False
        """Whether the engine is scaling a loss just now."""
        self.scaled_by_user = False
        self.scalers: dict[int, Any] = {}
        """For the ids of weights, the optimizer that scales their loss; known from an earlier trace."""
        self.changes_gradients = False
        """Whether an optimizer was applied with others than those that `value_and_grad` gave."""
        self._totals = totals
        self._given_gradients: dict[int, Any] = {}
        self._scaled: dict[int, tuple[Any, Any, Any]] = {}
        self._traces: list[Any] = []
        """The functions that JAX is tracing, of those whose arrays can be handed out: the code, and what `value_and_grad` differentiates."""
        self.rows: Any = None
        """The rows of this replica."""

    def begin(self) -> None:
        """Called in the trace in which the code is run."""
        self._traces = [tracing.state()]

    @contextlib.contextmanager
    def differentiating(self) -> Iterator[None]:
        """For the block, JAX traces what `value_and_grad` differentiates."""
        self._traces.append(tracing.state())
        try:
            yield
        finally:
            self._traces.pop()

    def divided(self, numerator: Any, divisor: Any) -> Any:
        """The numerator over the sum of all replicas' divisors."""
        self.divisors.append(divisor)
        return numerator if self._totals is None else ops.divide_no_nan(numerator, self._totals[len(self.divisors) - 1])

    def scaling(self, scale_loss: Any) -> Any:
        """`optimizer.scale_loss`, noted: the engine does not scale once more."""

        def noted(optimizer: Any, loss: Any) -> Any:
            if isinstance(optimizer, keras_private.LossScaleOptimizer) and not self.scales:
                self.scaled_by_user = True
            return scale_loss(optimizer, loss)

        return noted

    def note(self, kind: str, arrays: Any, of: Any = None) -> Any:
        """Remembers arrays; `value_and_grad` takes along what was noted inside of it."""
        if (self.is_looked_at or kind == "update") and tracing.state() in self._traces[-1:]:
            self.noted.append(Noted(kind, arrays, of))
        return arrays

    def fixed(self, divisor: float, of_row: int) -> Any:
        """A divisor that the code gives for so many values of each row: a constant that the compiler takes for a variable, so that it
        divides by it as by one that was counted."""
        self.fixed_divisors.append((divisor, of_row))
        return ops.where(self.share_of_rows > 2, ops.cast(0, "float32"), ops.cast(divisor, "float32"))

    def give_gradients(self, gradients: Sequence[Any]) -> None:
        """Note what `value_and_grad` hands out."""
        self._given_gradients |= {id(gradient): gradient for gradient in gradients}

    def keep_scaled(self, optimizer: Any, gradient: Any, scaled: Any) -> None:
        """What the optimizer that scaled the loss is to get, where the code hands it this gradient."""
        self._scaled[id(gradient)] = gradient, optimizer, scaled

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
        """What `optimizer.apply` does here: the gradients are summed over replicas, and applied once."""
        if tracing.state() not in self._traces[:1]:
            raise ValueError(
                f"The replica's code applies the optimizer {optimizer.name!r} inside of a function that JAX traces by itself (of ops.cond, "
                f"ops.scan, jax.jit and the like), where the update would be made whatever the condition. Apply it outside, for example "
                f"gradients times ops.cast(condition, 'float32')."
            )
        gradients = list(gradients)
        if not optimizer.built:
            if variables is None:
                raise ValueError(
                    "optimizer.apply received gradients without variables, and the optimizer is not built. Write "
                    "optimizer.apply(gradients, model.trainable_variables)."
                )
            raise NotBuiltError(optimizer, list(variables))
        variables = keras_private.weights_of(optimizer) if variables is None else list(variables)
        keras_private.check_known(optimizer, variables)
        if len(gradients) != len(variables):
            raise ValueError(f"optimizer.apply received {len(gradients)} gradients for {len(variables)} variables.")
        if any(update.optimizer is optimizer for update in self.updates):
            raise ValueError(
                f"The replica's code applies the optimizer {optimizer.name!r} twice, but one strategy.run makes one update of it. "
                f"Apply all gradients at once, or call strategy.run twice."
            )
        self.changes_gradients |= any(g is not None and id(g) not in self._given_gradients for g in gradients)
        found = {id(v): self._for(optimizer, g, v) for g, v in zip(gradients, variables, strict=True) if g is not None}
        if not found and variables:
            raise ValueError("optimizer.apply received no gradient: every one of them is None. Check what the loss depends on.")
        self.note("gradients", [g for g in found.values() if isinstance(g, Tracer)], of=optimizer)
        self.updates.append(Update(optimizer, found))
        self.scope.updated |= {id(v) for v in variables} | keras_private.updated_by(optimizer)

    def _for(self, optimizer: Any, gradient: Any, variable: Any) -> Any:
        if not isinstance(optimizer, keras_private.LossScaleOptimizer) or self.scaled_by_user:
            return gradient
        _, scaler, scaled = self._scaled.get(id(gradient), (None, None, None))
        # Of a gradient that the code has changed, or of a loss that another optimizer scaled, it is made anew.
        return scaled if scaler is optimizer else gradient * optimizer.dynamic_scale.value


class Current(threading.local):
    def __init__(self) -> None:
        self.code: ReplicaCode | None = None


_current = Current()


def current() -> ReplicaCode | None:
    """The replica whose code runs here; None outside."""
    return _current.code


@contextlib.contextmanager
def running(code: ReplicaCode, metrics: Sequence[Any] = ()) -> Iterator[ReplicaCode]:
    """Runs what stands in the block as the code of a replica that feeds these metrics."""
    before, _current.code = _current.code, code
    calls = {
        "apply": lambda _: lambda optimizer, grads, trainable_variables=None: code.apply(optimizer, grads, trainable_variables),
        "stateless_apply": lambda _: refuse_stateless_apply,
        "scale_loss": code.scaling,
        "crop": keras_private.crop_by_slices,
        **refused_calls.calls(code),
    }
    try:
        with code.scope, keras_private.replaced(calls), refused_calls.unreadable(code, metrics):
            yield code
    finally:
        _current.code = before


def refuse_stateless_apply(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "Replica code calls optimizer.stateless_apply, which would apply one replica's gradients alone. Write "
        "optimizer.apply(gradients, variables): there the gradients of all replicas are summed first."
    )
