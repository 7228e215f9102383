"""A policy of Orbax for when to save. Imported only where a policy is given: Orbax takes as long to import as all of Unisono."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeGuard

import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint.options import MultiprocessingOptions

from unisono._src.typing import Logs

policies = ocp.training.save_decision_policies


class Moment(NamedTuple):
    """A step and its time, as Orbax' policies see them."""

    step: int
    time: datetime.datetime
    metrics: Logs | None = None


class OrbaxPolicy(Protocol):
    """A policy of `orbax.checkpoint.experimental.v1.training.save_decision_policies`."""

    @property
    def should_save(self) -> Callable[..., bool]: ...


class SavePolicy:
    """A policy that decides when one training is saved."""

    def __init__(self, policy: OrbaxPolicy) -> None:
        self._policy = policy
        self._saved: list[Moment] = []

    @property
    def is_by_time(self) -> bool:
        """Return whether the policy decides by time alone, and not by the number of a step."""
        return isinstance(self._policy, policies.ContinuousCheckpointingPolicy)

    def is_due(self, step: int, is_saving: bool) -> bool:
        context = policies.DecisionContext(
            is_saving_in_progress=is_saving, reached_preemption=False, multiprocessing_options=MultiprocessingOptions()
        )
        return self._policy.should_save(make_moment(step), self._saved, context=context)

    def note_saved(self, step: int) -> None:
        self._saved = [make_moment(step)]


def is_policy(given: object) -> TypeGuard[OrbaxPolicy]:
    return isinstance(given, policies.SaveDecisionPolicy)


def make_moment(step: int) -> Moment:
    return Moment(step, datetime.datetime.now(tz=datetime.UTC))
