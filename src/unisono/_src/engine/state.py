"""The state of a step, what is recorded of it, and the number of steps that this run has begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np

from unisono._src.typing import Array, Shape

State: TypeAlias = tuple[list[Array], ...]
"""Groups of arrays. Most steps have the groups of Keras' loops."""


class Variable(Protocol):
    """A variable of a model, as records name it."""

    @property
    def path(self) -> str: ...

    @property
    def shape(self) -> Shape: ...


RecordedVariables: TypeAlias = Sequence[tuple[str, Sequence[Variable]]]
"""(kind, variables) that are recorded of a step: gradients, then the groups of the state without the metrics."""


UNTOLD_LOSS = np.array(0x7FC0_0001, np.uint32).view(np.float32)[()]


def list_told(losses: np.ndarray) -> list[float | None]:
    """List float32 losses, with None for those not reported."""
    losses = np.ascontiguousarray(losses, np.float32)
    is_untold = losses.view(np.uint32) == UNTOLD_LOSS.view(np.uint32)
    return [None if untold else loss for loss, untold in zip(losses.tolist(), is_untold.tolist(), strict=True)]


class StepCount:
    """A count of steps, which checkpoints keep. A step has one number so, in a run that is interrupted and resumed."""

    def __init__(self) -> None:
        self.steps = 0

    def add(self, steps: int) -> int:
        """Count steps. The result is the number of the first of them."""
        first = self.steps
        self.steps += steps
        return first


_count = StepCount()


def get_step_count() -> StepCount:
    """Get the count of this process."""
    return _count
