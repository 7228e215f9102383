"""Verification: now and then one replica's contribution is computed again elsewhere, and must have the same bits.

A contribution has the same bits on every device. So a difference is a fault of a device, and never rounding: a third run tells which device is
at fault, and the step is finished with the right contribution. `device_verification` is for the devices of a process, `process_verification`
for processes of one device each.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import jax

from unisono._src.observers.process_words import AttemptWords
from unisono._src.packing import PackedTree
from unisono._src.placement import Placement
from unisono._src.step.plan import BatchPlan, ReplicaRun


class DeviceFaultError(RuntimeError):
    """A device computed other bits than another device. The message names the device and its process, and says what to do.

    Where a step is not made because of a device of another process, the message names that process.

    The step was finished with the right contribution of the replica that was verified. If the fault repeats, or if it is not known which device
    is at fault, the step was not made, since the device has computed other replicas of the step as well: the state is that before it.
    """


class VerifiedReplica(NamedTuple):
    """The replica that a step verifies, and what computes its contribution."""

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
    """The choice of what is verified, by the step's number: it is the same in a run that is resumed. And the judgement of what was found.

    A step has one round, and a second round where what processes tell each other after the first does not agree.
    """

    def __init__(self, rate: float, placement: Placement) -> None:
        """`rate` of all steps are verified."""
        self._rate = Fraction(rate).limit_denominator(10**6)
        self._placement = placement

    @property
    def words(self) -> AttemptWords | None:
        """Return what processes tell each other with the sums of a step; None where there is one process."""
        return None

    def count_unverified(self, step: int) -> int:
        """Return how many steps from this one on are not verified."""
        turn = self.count_turns(step)
        return max(0, math.ceil((turn + 1) / self._rate) - 1 - step)

    def count_turns(self, step: int) -> int:
        """Return how many steps before this one were verified."""
        return math.floor(step * self._rate)

    def begin(self) -> None:  # noqa: B027
        """Forget what an earlier call of the step has left, which an error may have ended."""

    @abc.abstractmethod
    def choose(self, step: int, batch_plan: BatchPlan) -> VerifiedReplica | None:
        """Return the replica that a verified step verifies; None where it verifies none in this process."""

    @abc.abstractmethod
    def begin_round(self, verified: VerifiedReplica, run_on: RunOn) -> None:
        """Compute what this process computes for another process in a round."""

    @abc.abstractmethod
    def judge(self, verified: VerifiedReplica, first: Attempt, run_on: RunOn) -> PackedTree:
        """Return the contribution with which the step goes on, in the replica's process."""

    @abc.abstractmethod
    def end_round(self, verified: VerifiedReplica) -> bool:
        """End a round; return whether the step has another round."""

    @abc.abstractmethod
    def find_fault(self, verified: VerifiedReplica) -> DeviceFaultError | None:
        """Return the error to raise when the step is finished. Raise it at once where the fault repeats, or where the device is not known."""

    @abc.abstractmethod
    def check_processes(self) -> None:
        """Raise an error where another process does not make the step. All steps of all processes ask this, also those that verify nothing."""


def describe_contribution(verified: VerifiedReplica) -> str:
    return f"the contribution of replica {verified.replica} to step {verified.step}"


def describe_fault(wrong: str, what: str, right: str) -> str:
    """Return which device is at fault, and how that was seen."""
    return f"{wrong} is at fault: it computed {what} with other bits than {right}, and a third run has those of {right}."


def describe_repeat(repeats: bool, remedy: str) -> str:
    """Return whether the device at fault computed wrong bits once more, and what to do."""
    if repeats:
        return f"It computes wrong bits again: {remedy}, and go on."
    return f"It does not repeat there. If it comes again on this device, {remedy}."


NOT_LOOKED_AT = "Steps since the last verified one were not looked at."
FINISHED = f"The step was finished with the right contribution. {NOT_LOOKED_AT}"
UNFINISHED = f"The step was not made: the state is that before it. {NOT_LOOKED_AT}"


def name_device(device: jax.Device) -> str:
    return f"Device {device.id} ({device}) of process {device.process_index}"
