"""A replica of a model whose `train_step(state, data)`, `test_step` or `predict_step` is overridden.

The step runs as it is written, on the replica's rows, with the optimizer's `stateless_apply` taken over: the gradients that
it is given are the replica's contribution, applied once to the sum of all replicas. So the updated state does not exist
inside the step, and what stands in its place can be handed back but not used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from unisono._src import keras_private

METHODS = {"train": "train_step", "evaluate": "test_step", "predict": "predict_step"}

WAY = (
    "Call optimizer.stateless_apply once and return what it gives; what needs more than that is a loop of your own. If only the "
    "loss is another one, leave train_step as Keras has it and override compute_loss."
)


class Left(NamedTuple):
    """What a step leaves on a replica's rows."""

    gradients: list[Any]
    """None where the step makes no update."""
    others: list[Any]
    metrics: list[Any]
    logs: dict[str, Any]


def is_own(model: Any, mode: str) -> bool:
    return mode in METHODS and keras_private.overrides(model, METHODS[mode])


def call_step(model: Any, mode: str, state: tuple[list[Any], ...], batch: Any) -> Any:
    """Return what the user's own step returns. No loss of an earlier trace is left for it."""
    keras_private.forget_losses(model)
    with keras_private.compilable_crops(model):
        return getattr(model, METHODS[mode])(state, batch)


def run(model: Any, mode: str, state: tuple[list[Any], ...], batch: Any) -> Left:
    if mode == "evaluate":
        logs, (_, others, metrics) = parts(call_step(model, mode, state, batch), mode, 3)
        return Left([], list(others), list(metrics), dict(logs or {}))
    taken = Taken(state[0], state[2])
    with keras_private.wrapped_method(model.optimizer, "stateless_apply", lambda _: taken):
        logs, (weights, others, slots, metrics) = parts(call_step(model, mode, state, batch), mode, 4)
    return Left(taken.given_back(weights, slots), list(others), list(metrics), dict(logs or {}))


def predicted(model: Any, state: tuple[list[Any], ...], batch: Any) -> tuple[Any, list[Any]]:
    """Return (outputs, the non-trainable variables' values) of a `predict_step`."""
    returned = call_step(model, "predict", state, batch)
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], list | tuple)):
        raise ValueError(
            f"predict_step must return outputs and state, as Keras' step on JAX does, and returned {type(returned).__name__}. End it "
            f"with: return outputs, non_trainable_variables"
        )
    return returned[0], list(returned[1])


def parts(returned: Any, mode: str, groups: int) -> Any:
    """(logs, groups of the state), if that is what the step returned."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], tuple) and len(returned[1]) == groups:
        return returned
    names = ["trainable_variables", "non_trainable_variables", *["optimizer_variables"] * (groups == 4), "metrics_variables"]
    raise ValueError(
        f"{METHODS[mode]} must return logs and state, as Keras' steps on JAX do, and returned {type(returned).__name__}. End it "
        f"with: return logs, ({', '.join(names)})"
    )


class Taken:
    """Takes the place of `stateless_apply`, once."""

    def __init__(self, weights: list[Any], slots: list[Any]) -> None:
        """`weights` and `slots` are the values from which the step goes on."""
        self._gradients: list[Any] | None = None
        self._weights: list[Any] = list(weights)
        self._slots: list[Any] = list(slots)

    def __call__(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> tuple[list[Updated], list[Updated]]:
        if self._gradients is not None:
            raise ValueError(f"train_step applies gradients twice; replicas contribute to one update of a step. {WAY}")
        self._gradients = list(grads)
        self._weights = [Updated() for _ in trainable_variables]
        self._slots = [Updated() for _ in optimizer_variables]
        return self._weights, self._slots

    def given_back(self, weights: Any, slots: Any) -> list[Any]:
        """The gradients, when the step has returned what it was given; none where it makes no update."""
        for name, returned, given in (("trainable", weights, self._weights), ("optimizer", slots, self._slots)):
            if len(returned) != len(given) or any(a is not b for a, b in zip(returned, given, strict=True)):
                by = (
                    "stateless_apply gave it"
                    if self._gradients is not None
                    else "it was given, without optimizer.stateless_apply"
                )
                raise ValueError(f"train_step returns other {name} variables than {by}. {WAY}")
        return self._gradients or []


def refuse(*_: Any, **__: Any) -> Any:
    raise ValueError(
        f"train_step uses the updated weights or optimizer variables, but the update comes when all replicas have given their "
        f"gradients. {WAY}"
    )


class Updated:
    """Stands for a weight or an optimizer variable after the update."""

    shape = dtype = ndim = size = property(refuse)
    __jax_array__ = __array__ = __len__ = __getitem__ = __iter__ = __float__ = __bool__ = refuse
    __neg__ = __abs__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = refuse
    __lt__ = __le__ = __gt__ = __ge__ = refuse
