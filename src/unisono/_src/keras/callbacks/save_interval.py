"""When a training is saved. It is after epochs, after a number of steps, or as a policy decides."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Protocol, TypeAlias, runtime_checkable

from unisono._src.keras.checkpoint.store import CheckpointInfo
from unisono._src.keras.fit.steps_per_call import MOST_STEPS


@runtime_checkable
class SavePolicy(Protocol):
    """Decides whether to save after a step, like Orbax's policies."""

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: SimpleNamespace
    ) -> bool: ...


SaveFrequency: TypeAlias = str | int | SavePolicy
"""When to save: "epoch"; a number of steps; False for signals alone; or a policy."""


class SaveInterval:
    """A count of steps, which says when to save."""

    def __init__(self, save_freq: SaveFrequency) -> None:
        self._every = save_freq if isinstance(save_freq, int) and not isinstance(save_freq, bool) else 0
        self._policy = save_freq if isinstance(save_freq, SavePolicy) else None
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
        """Count the steps that one call may take before a save."""
        if self._policy is not None and not hasattr(self._policy, "minimum_interval_secs"):  # it may wait for a certain step
            return 1
        return self._every - self.steps % self._every if self._every else MOST_STEPS

    def count_steps(self, steps: int, is_saving: bool) -> None:
        """Count steps that were taken. `is_saving`: the last checkpoint is still being written."""
        before = self.steps
        self.steps += steps
        if self._every:
            self.is_due |= before // self._every < self.steps // self._every
        elif self._policy is not None:
            one_process = SimpleNamespace(primary_host=0)
            context = SimpleNamespace(
                is_saving_in_progress=is_saving, reached_preemption=False, multiprocessing_options=one_process
            )
            self.is_due |= self._policy.should_save(self._describe_now(), self._saved, context=context)

    def note_saved(self) -> None:
        self.is_due = False
        self._saved = [self._describe_now()]

    def _describe_now(self) -> CheckpointInfo:
        return CheckpointInfo(self.steps, datetime.datetime.now(tz=datetime.UTC))
