"""When a training is saved: after epochs, after a number of steps, or as a policy of Orbax decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from unisono._src.fit.steps_per_call import MOST_STEPS

if TYPE_CHECKING:
    from unisono._src.callbacks.save_policy import OrbaxPolicy, SavePolicy

SaveFrequency: TypeAlias = "str | int | OrbaxPolicy"
"""When to save: "epoch"; a number of steps; False for signals alone; or a policy."""


class SaveInterval:
    """A count of the steps of a training, which tells when to save."""

    def __init__(self, save_freq: SaveFrequency, is_saving: Callable[[], bool]) -> None:
        """Check `save_freq`. `is_saving` returns whether the last checkpoint is still being written."""
        every = save_freq if isinstance(save_freq, int) and not isinstance(save_freq, bool) else 0
        self._policy = None if every or save_freq in ("epoch", False) else make_policy(save_freq)
        if not (every > 0 or save_freq == "epoch" or save_freq is False or self._policy):
            raise ValueError(
                f"save_freq is 'epoch', a number of steps, False for signals alone, or a policy of "
                f"orbax.checkpoint.experimental.v1.training.save_decision_policies; received {save_freq!r}."
            )
        self.after_epochs = save_freq == "epoch"
        self._every = every or None
        self._is_saving = is_saving
        self.steps = 0
        """The steps since the training began."""
        self._due_since_saved = False

    def count_steps_until_due(self) -> int:
        """Return how many steps one call may take before a step after which the training is saved."""
        if self._policy is not None:  # it may wait for a certain step
            return MOST_STEPS if self._policy.is_by_time else 1
        return MOST_STEPS if self._every is None else self._every - self.steps % self._every

    def count_steps(self, steps: int) -> None:
        before = self.steps
        self.steps = self.steps + steps
        if self._every is not None:
            self._due_since_saved |= before // self._every < self.steps // self._every
        elif self._policy is not None:
            self._due_since_saved |= self._policy.is_due(self.steps, self._is_saving())

    @property
    def is_due(self) -> bool:
        return self._due_since_saved

    def note_saved(self) -> None:
        self._due_since_saved = False
        if self._policy is not None:
            self._policy.note_saved(self.steps)


def make_policy(save_freq: object) -> SavePolicy | None:
    from unisono._src.callbacks import save_policy

    return save_policy.SavePolicy(save_freq) if save_policy.is_policy(save_freq) else None
