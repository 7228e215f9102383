"""A replica of a model whose `train_step(state, data)`, `test_step` or `predict_step` is overridden.

The step runs as it is written, on the replica's rows, with the optimizer's `stateless_apply` replaced: the gradients that
it gets are the replica's contribution, applied once to the sum of all replicas. So the updated state does not exist
inside the step. Placeholders stand in its place: the step can return them, but not use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import keras

from unisono._src.keras_private.compiled_losses import forget_added_losses
from unisono._src.keras_private.crops import make_crops_compilable
from unisono._src.keras_private.instances import wrap_method
from unisono._src.keras_private.models import overrides_method
from unisono._src.replica.protocol import State
from unisono._src.typing import Array, Logs, Outputs, PyTree, UserObject, is_list_or_tuple, is_tuple

METHODS = {"train": "train_step", "evaluate": "test_step", "predict": "predict_step"}

WAY = (
    "Call optimizer.stateless_apply once and return what it gives; what needs more than that is a loop of your own. If only the "
    "loss is another one, leave train_step as Keras has it and override compute_loss."
)


class StepResult(NamedTuple):
    """The result of a step on a replica's rows."""

    gradients: list[Array]
    """Empty where the step makes no update."""
    non_trainable: list[Array]
    metrics: list[Array]
    logs: Logs


def is_user_step(model: keras.Model, mode: str) -> bool:
    """Return whether the model's class overrides the step of this mode."""
    return mode in METHODS and overrides_method(model, METHODS[mode])


def call_user_step(model: keras.Model, mode: str, state: State, batch: PyTree) -> UserObject:
    """Return the result of the user step. Losses of earlier traces are forgotten before it runs."""
    forget_added_losses(model)
    with make_crops_compilable(model):
        return getattr(model, METHODS[mode])(state, batch)


def run_user_step(model: keras.Model, mode: str, state: State, batch: PyTree) -> StepResult:
    """Run a user step of training or evaluation on a replica's rows."""
    if mode == "evaluate":
        logs, (_, non_trainable, metrics) = check_result(call_user_step(model, mode, state, batch), mode, 3)
        return StepResult([], list(non_trainable), list(metrics), dict(logs or {}))
    recorder = GradientRecorder(state[0], state[2])
    with wrap_method(model.optimizer, "stateless_apply", lambda _: recorder):
        logs, (weights, non_trainable, slots, metrics) = check_result(call_user_step(model, mode, state, batch), mode, 4)
    return StepResult(recorder.check_returned(weights, slots), list(non_trainable), list(metrics), dict(logs or {}))


def run_predict_step(model: keras.Model, state: State, batch: PyTree) -> tuple[Outputs, list[Array]]:
    """Return (outputs, the non-trainable variables' values) of a `predict_step`."""
    returned = call_user_step(model, "predict", state, batch)
    if not (is_tuple(returned) and len(returned) == 2 and is_list_or_tuple(returned[1])):
        raise ValueError(
            f"predict_step must return outputs and state, as Keras' step on JAX does, and returned {type(returned).__name__}. End it "
            f"with: return outputs, non_trainable_variables"
        )
    return returned[0], list(returned[1])


def check_result(returned: UserObject, mode: str, groups: int) -> tuple[Logs | None, tuple[Sequence[Array], ...]]:
    """Return the result of a step, if it is (logs, groups of the state); else refuse it."""
    if is_tuple(returned) and len(returned) == 2 and is_tuple(returned[1]) and len(returned[1]) == groups:
        return returned[0], returned[1]
    names = ["trainable_variables", "non_trainable_variables", *["optimizer_variables"] * (groups == 4), "metrics_variables"]
    raise ValueError(
        f"{METHODS[mode]} must return logs and state, as Keras' steps on JAX do, and returned {type(returned).__name__}. End it "
        f"with: return logs, ({', '.join(names)})"
    )


class GradientRecorder:
    """A stand-in for `stateless_apply`, to be called once: it keeps the gradients and returns placeholders."""

    def __init__(self, weights: list[Array], slots: list[Array]) -> None:
        """`weights` and `slots` are the values from which the step goes on."""
        self._gradients: list[Array] | None = None
        self._weights: list[Array] | list[UpdatedValue] = list(weights)
        self._slots: list[Array] | list[UpdatedValue] = list(slots)

    def __call__(
        self, optimizer_variables: Sequence[Array], grads: Sequence[Array], trainable_variables: Sequence[Array]
    ) -> tuple[list[UpdatedValue], list[UpdatedValue]]:
        if self._gradients is not None:
            raise ValueError(f"train_step applies gradients twice; replicas contribute to one update of a step. {WAY}")
        self._gradients = list(grads)
        self._weights = [UpdatedValue() for _ in trainable_variables]
        self._slots = [UpdatedValue() for _ in optimizer_variables]
        return self._weights, self._slots

    def check_returned(self, weights: Sequence[object], slots: Sequence[object]) -> list[Array]:
        """Return the gradients, if the step has returned the values that it was given; none where it makes no update."""
        for name, returned, given in (("trainable", weights, self._weights), ("optimizer", slots, self._slots)):
            if len(returned) != len(given) or any(value is not expected for value, expected in zip(returned, given, strict=True)):
                origin = (
                    "stateless_apply gave it"
                    if self._gradients is not None
                    else "it was given, without optimizer.stateless_apply"
                )
                raise ValueError(f"train_step returns other {name} variables than {origin}. {WAY}")
        return self._gradients or []


def refuse_use(*_: object, **__: object) -> NoReturn:
    """Refuse every use of a placeholder."""
    raise ValueError(
        f"train_step uses the updated weights or optimizer variables, but the update comes when all replicas have given their "
        f"gradients. {WAY}"
    )


class UpdatedValue:
    """A placeholder for the value of a weight or an optimizer variable after the update."""

    shape = dtype = ndim = size = property(refuse_use)
    __jax_array__ = __array__ = __len__ = __getitem__ = __iter__ = __float__ = __bool__ = refuse_use
    __neg__ = __abs__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = refuse_use
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = refuse_use
    __lt__ = __le__ = __gt__ = __ge__ = refuse_use
