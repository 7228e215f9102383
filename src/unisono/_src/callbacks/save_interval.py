"""When a training is saved: after epochs, after a number of steps, or as a policy of Orbax decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from unisono._src.fit.steps_per_call import MOST_STEPS

if TYPE_CHECKING:
    from orbax.checkpoint.experimental.v1.training import save_decision_policies

    from unisono._src.callbacks.save_policy import SavePolicy

SaveFrequency: TypeAlias = "str | int | save_decision_policies.SaveDecisionPolicy"
"""When to save: "epoch"; a number of steps; False for signals alone; or a policy."""


class SaveInterval:
    """A count of the steps of a training, which tells when to save."""

    def __init__(self, save_freq: SaveFrequency) -> None:
        self._every = save_freq if isinstance(save_freq, int) and not isinstance(save_freq, bool) else 0
        self._policy = None if self._every or save_freq in ("epoch", False) else find_policy(save_freq)
        if not (self._every > 0 or save_freq == "epoch" or save_freq is False or self._policy):
            raise ValueError(
                f"save_freq is 'epoch', a number of steps, False for signals alone, or a policy of "
                f"orbax.checkpoint.experimental.v1.training.save_decision_policies; received {save_freq!r}."
            )
        self.after_epochs = save_freq == "epoch"
        self.steps = 0
        """The steps since the training began."""
        self.is_due = False

    def count_steps_until_due(self) -> int:
        """Return how many steps one call may take before a step after which the training is saved."""
        if self._policy is not None:  # it may wait for a certain step
            return MOST_STEPS if self._policy.is_by_time else 1
        return self._every - self.steps % self._every if self._every else MOST_STEPS

    def count_steps(self, steps: int, is_saving: bool) -> None:
        """Count steps that were taken. `is_saving`: the last checkpoint is still being written."""
        before = self.steps
        self.steps += steps
        if self._every:
            self.is_due |= before // self._every < self.steps // self._every
        elif self._policy is not None:
            self.is_due |= self._policy.is_due(self.steps, is_saving)

    def note_saved(self) -> None:
        self.is_due = False
        if self._policy is not None:
            self._policy.note_saved(self.steps)


def find_policy(save_freq: object) -> SavePolicy | None:
    from unisono._src.callbacks import save_policy

    return save_policy.make_policy(save_freq)
