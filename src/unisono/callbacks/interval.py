"""When a training is saved: after epochs, after so many steps, or as a policy of Orbax decides."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, NamedTuple

import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint.options import MultiprocessingOptions

from unisono.pace import MOST_STEPS

policies = ocp.training.save_decision_policies


class Moment(NamedTuple):
    """What Orbax' policies look at."""

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None = None


class Interval:
    """Counts the steps of a training."""

    def __init__(self, save_freq: Any, is_saving: Callable[[], bool]) -> None:
        """`is_saving` says whether the checkpoint before is still being written."""
        every = save_freq if isinstance(save_freq, int) and not isinstance(save_freq, bool) else 0
        self._policy: Any = save_freq if isinstance(save_freq, policies.SaveDecisionPolicy) else None
        if not (every > 0 or save_freq == "epoch" or save_freq is False or self._policy):
            raise ValueError(
                f"save_freq is 'epoch', a number of steps, False for signals alone, or a policy of "
                f"orbax.checkpoint.experimental.v1.training.save_decision_policies; received {save_freq!r}."
            )
        self.after_epochs = save_freq == "epoch"
        self._every = every or None
        self._is_saving = is_saving
        self.steps = 0
        """Since the training began."""
        self._due_since_saved = False
        self._saved: list[Moment] = []

    def until_due(self) -> int:
        """How many steps may come at once before one that is saved."""
        if self._policy is not None:  # which may wait for a certain step, unless it looks at the clock
            return MOST_STEPS if isinstance(self._policy, policies.ContinuousCheckpointingPolicy) else 1
        return MOST_STEPS if self._every is None else self._every - self.steps % self._every

    def passed(self, steps: int) -> None:
        before, self.steps = self.steps, self.steps + steps
        if self._every is not None:
            self._due_since_saved |= before // self._every < self.steps // self._every
        elif self._policy is not None:
            self._due_since_saved |= self._policy.should_save(self._now(), self._saved, context=self._context())

    @property
    def is_due(self) -> bool:
        return self._due_since_saved

    def saved(self) -> None:
        self._due_since_saved = False
        self._saved = [self._now()]

    def _now(self) -> Moment:
        return Moment(self.steps, datetime.datetime.now(tz=datetime.UTC))

    def _context(self) -> Any:
        return policies.DecisionContext(
            is_saving_in_progress=self._is_saving(), reached_preemption=False, multiprocessing_options=MultiprocessingOptions()
        )
