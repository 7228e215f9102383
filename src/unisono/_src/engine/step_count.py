"""The number of training steps that this run has begun. It goes on over processes that resume from each other's checkpoints."""

from __future__ import annotations


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
