"""A policy of Orbax for when to save. Imported only where a policy is given: Orbax takes as long to import as all of Unisono."""

from __future__ import annotations

import datetime

import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint.options import MultiprocessingOptions

from unisono._src.checkpoint.store import CheckpointInfo

policies = ocp.training.save_decision_policies


class SavePolicy:
    """A policy that decides when one training is saved."""

    def __init__(self, policy: policies.SaveDecisionPolicy) -> None:
        self._policy = policy
        self._saved: list[CheckpointInfo] = []
        self.is_by_time = isinstance(policy, policies.ContinuousCheckpointingPolicy)
        """Whether the policy decides by time alone, and not by the number of a step."""

    def is_due(self, step: int, is_saving: bool) -> bool:
        context = policies.DecisionContext(
            is_saving_in_progress=is_saving, reached_preemption=False, multiprocessing_options=MultiprocessingOptions()
        )
        return self._policy.should_save(make_info(step), self._saved, context=context)

    def note_saved(self, step: int) -> None:
        self._saved = [make_info(step)]


def make_policy(save_freq: object) -> SavePolicy | None:
    return SavePolicy(save_freq) if isinstance(save_freq, policies.SaveDecisionPolicy) else None


def make_info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step, datetime.datetime.now(tz=datetime.UTC))
