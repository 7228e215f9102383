"""Verification: now and then one replica's contribution is computed again on another device, and must have the same bits.

Here between the devices of a process; `process_verification` is for processes of one device each.

A contribution has the same bits on every device. So a difference is a fault of a device, and never rounding: a third run tells which device is
at fault, and the step is finished with the right contribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import jax

from unisono._src.packing import PackedTree
from unisono._src.placement import Placement
from unisono._src.step.plan import BatchPlan


class DeviceFaultError(RuntimeError):
    """A device computed other bits than another device. The message names the device and its process, and says what to do.

    Attributes:
        is_state_sound: Whether the weights are those of a run without the fault in this step: the step was finished with the right bits, or
            not made. Save them only then.
    """

    def __init__(self, message: str, is_state_sound: bool = True) -> None:
        super().__init__(message)
        self.is_state_sound = is_state_sound


class VerifiedReplica(NamedTuple):
    """The replica that a step verifies, and the devices that compute its contribution, by their indices."""

    step: int
    replica: int
    owner: int
    """The device whose contribution counts."""
    other: int
    """The device that computes it again."""


class Attempt(NamedTuple):
    """A contribution as a device has computed it."""

    device: int
    contribution: PackedTree
    digest: tuple[int, ...]


RunOn: TypeAlias = Callable[[int], Attempt]
"""Computes the contribution on a device."""


class Fault(NamedTuple):
    """The fault of a device, as attempts have shown it."""

    wrong: Attempt
    right: Attempt
    repeats: bool
    """Whether the device at fault computed wrong bits once more."""


class VerificationSchedule:
    """The choice of the steps that are verified, by their numbers: it is the same in a run that is resumed."""

    def __init__(self, rate: float, placement: Placement) -> None:
        """`rate` of all steps are verified."""
        self._rate = Fraction(rate).limit_denominator(10**6)
        self._placement = placement

    def count_unverified(self, step: int) -> int:
        """Return how many steps from this one on are not verified."""
        turn = self.count_turns(step)
        return max(0, math.ceil((turn + 1) / self._rate) - 1 - step)

    def count_turns(self, step: int) -> int:
        """Return how many steps before this one were verified."""
        return math.floor(step * self._rate)


class DeviceVerification(VerificationSchedule):
    """Verification inside of each process: the choice of replica and devices, and the judgement of what was found."""

    def choose(self, step: int, batch_plan: BatchPlan) -> VerifiedReplica | None:
        """Return the replica that a step verifies: replicas take turns, and so do the devices. None where this process has no rows, and where
        the step is not verified."""
        owners = [part.device for part in batch_plan.parts for run in part.runs for _ in range(run.count)]
        if not owners or self.count_unverified(step):
            return None
        round_, place = divmod(self.count_turns(step), len(owners))
        devices = len(self._placement.devices)
        other = (owners[place] + 1 + round_ % (devices - 1)) % devices
        return VerifiedReplica(step, batch_plan.shards[place].replica, owners[place], other)

    def judge(self, verified: VerifiedReplica, first: Attempt, run_on: RunOn) -> tuple[PackedTree, DeviceFaultError | None]:
        """Return (the contribution with which the step goes on, the error to raise when the step is finished)."""
        second = run_on(verified.other)
        if first.digest == second.digest:
            return first.contribution, None
        fault = self._find_fault(first, second, run_on)
        what = f"the contribution of replica {verified.replica} to step {verified.step}"
        if fault is None:
            return first.contribution, DeviceFaultError(self._describe_doubt(what, first, second), is_state_sound=False)
        return fault.right.contribution, DeviceFaultError(self._describe_fault(what, fault))

    def _find_fault(self, first: Attempt, second: Attempt, run_on: RunOn) -> Fault | None:
        """Return the fault; None where attempts do not tell which device is at fault."""
        devices = range(len(self._placement.devices))
        third_device = next((index for index in devices if index not in (first.device, second.device)), None)
        pairs = (first, second), (second, first)
        if third_device is None:  # at fault is the device that contradicts itself
            return next((Fault(one, other, False) for one, other in pairs if run_on(one.device).digest == other.digest), None)
        third = run_on(third_device)
        return next(
            (
                Fault(one, other, repeats=run_on(one.device).digest != other.digest)
                for one, other in pairs
                if third.digest == other.digest
            ),
            None,
        )

    def _describe_fault(self, what: str, fault: Fault) -> str:
        right = self._name_device(fault.right)
        again = (
            "It computes wrong bits again: leave this device out (devices=), and go on."
            if fault.repeats
            else "It does not repeat there. If it comes again on this device, leave the device out (devices=)."
        )
        return f"{describe_fault(self._name_device(fault.wrong), what, right)} {again} {FINISHED}"

    def _describe_doubt(self, what: str, first: Attempt, second: Attempt) -> str:
        one = self._name_device(first)
        other = self._name_device(second)
        return (
            f"{one} and {other} compute {what} with other bits, and more runs do not tell which of them is at fault. The step was finished with "
            f"that of {one}: do not go on from here. Run `unisono doctor` on each, and go on from the last checkpoint without the one that "
            f"parts."
        )

    def _name_device(self, attempt: Attempt) -> str:
        return name_device(self._placement.devices[attempt.device])


def describe_fault(wrong: str, what: str, right: str) -> str:
    """Return which device is at fault, and how that was seen."""
    return f"{wrong} is at fault: it computed {what} with other bits than {right}, and a third run has those of {right}."


FINISHED = "The step was finished with the right contribution, so the state is whole; steps since the last verified one were not looked at."


def name_device(device: jax.Device) -> str:
    return f"Device {device.id} ({device}) of process {device.process_index}"
