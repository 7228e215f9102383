"""A policy of Orbax for when to save. Imported where somebody gives one: Orbax takes as long to import as all of Unisono."""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple

import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint.options import MultiprocessingOptions

policies = ocp.training.save_decision_policies


class Moment(NamedTuple):
    """What Orbax' policies look at."""

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None = None


class SavePolicy:
    """One that decides over a training."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._saved: list[Moment] = []

    @property
    def looks_at_the_clock(self) -> bool:
        """And at no step by its number."""
        return isinstance(self._policy, policies.ContinuousCheckpointingPolicy)

    def is_due(self, step: int, is_saving: bool) -> bool:
        context = policies.DecisionContext(
            is_saving_in_progress=is_saving, reached_preemption=False, multiprocessing_options=MultiprocessingOptions()
        )
        return self._policy.should_save(now(step), self._saved, context=context)

    def saved(self, step: int) -> None:
        self._saved = [now(step)]


def is_policy(given: Any) -> bool:
    return isinstance(given, policies.SaveDecisionPolicy)


def now(step: int) -> Moment:
    return Moment(step, datetime.datetime.now(tz=datetime.UTC))
