"""Verification: a replica's contribution is computed again elsewhere.

This is done for some of the steps. A contribution has the same bits on every device. So a difference is a fault of a device, and
never rounding. A third run shows which device is at fault, and the step is finished with the right contribution.
`device_verification` is for the devices of a process, `process_verification` for processes of one device each.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import jax

from unisono._src.engine.observers.process_comparison import AttemptWords
from unisono._src.engine.packing import PackedTree
from unisono._src.engine.step.plan import BatchPlan, ReplicaRun
from unisono._src.placement import Placement


class DeviceFaultError(RuntimeError):
    """A device computed other bits than another device. The message names the device and its process, and says what to do.

    Where a step is not made because of a device of another process, the message names that process.

    The step was finished with the right contribution of the replica that was verified. If the fault repeats, or if it is not known which device
    is at fault, the step was not made, since the device has computed other replicas of the step as well: the state is that before it.
    """


class VerifiedReplica(NamedTuple):
    """The replica that a step verifies, and what computes it."""

    step: int
    run: ReplicaRun
    """The replica by itself."""
    device: int
    """The device whose contribution counts, in the replica's process."""
    computed_by: tuple[int, ...]
    """The devices of this process, or the processes, that compute the contribution; first the device or the process of the replica."""

    @property
    def replica(self) -> int:
        return self.run.first


class Attempt(NamedTuple):
    """A contribution as a device has computed it."""

    device: int
    contribution: PackedTree
    digest: tuple[int, ...]


RunOn: TypeAlias = Callable[[int], Attempt]
"""Computes the contribution on a device."""


class Verification(abc.ABC):
    """What is verified, and what follows from it.

    The choice depends on the step's number alone, so a resumed run makes the same choice. A step has one round. It has a second
    round if the digests of the processes differ after the first.
    """

    def __init__(self, rate: float, placement: Placement) -> None:
        """Prepare to verify `rate` of all steps."""
        self._rate = Fraction(rate).limit_denominator(10**6)
        self._placement = placement

    @property
    def words(self) -> AttemptWords | None:
        """The digests that processes send with a step's all-reduces. It is None if there is one process."""
        return None

    def count_unverified(self, step: int) -> int:
        """Count the steps from this one until a verified step."""
        turn = self.count_turns(step)
        return max(0, math.ceil((turn + 1) / self._rate) - 1 - step)

    def count_turns(self, step: int) -> int:
        """Count the verified steps before this one."""
        return math.floor(step * self._rate)

    def begin(self) -> None:  # noqa: B027
        """Forget what an earlier call of the step has left. An error may have ended that call."""

    @abc.abstractmethod
    def choose(self, step: int, batch_plan: BatchPlan) -> VerifiedReplica | None:
        """Choose the replica that a verified step verifies. It is None if this process verifies none."""

    @abc.abstractmethod
    def begin_round(self, verified: VerifiedReplica, run_on: RunOn) -> None:
        """Compute a contribution for another process, if a round needs it."""

    @abc.abstractmethod
    def judge(self, verified: VerifiedReplica, first: Attempt, run_on: RunOn) -> PackedTree:
        """Choose the contribution that counts, in the replica's process."""

    @abc.abstractmethod
    def end_round(self, verified: VerifiedReplica) -> bool:
        """End a round. Say whether the step has another one."""

    @abc.abstractmethod
    def find_fault(self, verified: VerifiedReplica) -> DeviceFaultError | None:
        """Find the error to raise after the step. It is raised at once if the fault repeats, or if the device is not known."""

    @abc.abstractmethod
    def check_processes(self) -> None:
        """Raise an error if another process does not finish the step.

        All processes call it in all steps, also in steps that verify nothing.
        """


def describe_contribution(verified: VerifiedReplica) -> str:
    return f"the contribution of replica {verified.replica} to step {verified.step}"


def describe_fault(wrong: str, what: str, right: str) -> str:
    """Say which device is at fault, and what showed it."""
    return f"{wrong} is at fault: it computed {what} with other bits than {right}, and a third run has those of {right}."


def describe_repeat(repeats: bool, remedy: str) -> str:
    """Say whether the device erred again, and what to do."""
    if repeats:
        return f"It computes wrong bits again: {remedy}, and go on."
    return f"It does not repeat there. If it comes again on this device, {remedy}."


NOT_LOOKED_AT = "Steps since the last verified one were not looked at."
FINISHED = f"The step was finished with the right contribution. {NOT_LOOKED_AT}"
UNFINISHED = f"The step was not made: the state is that before it. {NOT_LOOKED_AT}"


def name_device(device: jax.Device) -> str:
    return f"Device {device.id} ({device}) of process {device.process_index}"
