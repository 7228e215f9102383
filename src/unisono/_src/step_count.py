"""The number of training steps that this run has begun, over all processes that went on from one checkpoint to the next."""

from __future__ import annotations


class StepCount:
    """A count of steps. Checkpoints keep it, so that a step has one number in a run that is interrupted and resumed."""

    def __init__(self) -> None:
        self.steps = 0

    def add(self, steps: int) -> int:
        """Count steps; return the number of the first of them."""
        first = self.steps
        self.steps += steps
        return first


_count = StepCount()


def get_step_count() -> StepCount:
    """Return the count of this process."""
    return _count
