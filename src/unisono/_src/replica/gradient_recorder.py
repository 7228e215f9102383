"""Stand-ins for the optimizer's update inside a `train_step` of the user's: the gradients that it gets, and placeholders for what it gives.

The update comes once, from the sum of all replicas. So the updated state does not exist inside the step. Placeholders stand in its place: the
step can return them, but not use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from unisono._src.typing import Array

WAY = (
    "Call optimizer.stateless_apply once and return what it gives; what needs more than that is a loop of your own. If only the "
    "loss is another one, leave train_step as Keras has it and override compute_loss."
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

    shape = dtype = ndim = size = __jax_array__ = property(refuse_use)
    __array__ = __len__ = __getitem__ = __iter__ = __float__ = __bool__ = refuse_use
    __neg__ = __abs__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = refuse_use
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = refuse_use
    __lt__ = __le__ = __gt__ = __ge__ = refuse_use
