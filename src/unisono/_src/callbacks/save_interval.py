"""When a training is saved: after epochs, after a number of steps, or as a policy of Orbax decides.

Orbax takes as long to import as all of Unisono, and is imported only where something is neither "epoch" nor a number.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, TypeAlias

from unisono._src.checkpoint.store import CheckpointInfo
from unisono._src.fit.steps_per_call import MOST_STEPS

if TYPE_CHECKING:
    from orbax.checkpoint.experimental.v1.training import save_decision_policies as policies

SaveFrequency: TypeAlias = "str | int | policies.SaveDecisionPolicy"
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
        self._saved: list[CheckpointInfo] = []

    def count_steps_until_due(self) -> int:
        """Return how many steps one call may take before a step after which the training is saved."""
        if self._policy is not None and not decides_by_time(self._policy):  # it may wait for a certain step
            return 1
        return self._every - self.steps % self._every if self._every else MOST_STEPS

    def count_steps(self, steps: int, is_saving: bool) -> None:
        """Count steps that were taken. `is_saving`: the last checkpoint is still being written."""
        before = self.steps
        self.steps += steps
        if self._every:
            self.is_due |= before // self._every < self.steps // self._every
        elif self._policy is not None:
            self.is_due |= is_policy_due(self._policy, self._describe_now(), self._saved, is_saving)

    def note_saved(self) -> None:
        self.is_due = False
        self._saved = [self._describe_now()]

    def _describe_now(self) -> CheckpointInfo:
        return CheckpointInfo(self.steps, datetime.datetime.now(tz=datetime.UTC))


def find_policy(save_freq: object) -> policies.SaveDecisionPolicy | None:
    from orbax.checkpoint.experimental.v1.training import save_decision_policies as policies

    return save_freq if isinstance(save_freq, policies.SaveDecisionPolicy) else None


def decides_by_time(policy: policies.SaveDecisionPolicy) -> bool:
    """Return whether a policy decides by time alone, and not by the number of a step."""
    from orbax.checkpoint.experimental.v1.training import save_decision_policies as policies

    return isinstance(policy, policies.ContinuousCheckpointingPolicy)


def is_policy_due(policy: policies.SaveDecisionPolicy, now: CheckpointInfo, saved: list[CheckpointInfo], is_saving: bool) -> bool:
    from orbax.checkpoint.experimental.v1.training import save_decision_policies as policies
    from orbax.checkpoint.options import MultiprocessingOptions

    context = policies.DecisionContext(
        is_saving_in_progress=is_saving, reached_preemption=False, multiprocessing_options=MultiprocessingOptions()
    )
    return policy.should_save(now, saved, context=context)  # pyright: ignore[reportArgumentType]  # of a checkpoint it reads step, time and metrics
