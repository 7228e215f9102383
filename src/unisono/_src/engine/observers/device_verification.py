"""Verification inside a process, by a second device.

The other device computes a contribution again, and a third run decides at once if they differ. A process that does not finish the
step says so with the all-reduce of the step, so that no other process finishes it either.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono._src.engine.observers.process_comparison import NO_ATTEMPT, AttemptDigest, AttemptWords
from unisono._src.engine.observers.verification import (
    FINISHED,
    UNFINISHED,
    Attempt,
    DeviceFaultError,
    RunOn,
    Verification,
    VerifiedReplica,
    describe_contribution,
    describe_fault,
    describe_repeat,
    name_device,
)
from unisono._src.engine.packing import PackedTree
from unisono._src.engine.step.plan import BatchPlan
from unisono._src.placement import Placement

NOT_MADE: AttemptDigest = (1, 0)
"""What a process sends to the others if it does not finish the step."""


class Fault(NamedTuple):
    """The fault of a device, as attempts have shown it."""

    wrong: Attempt
    right: Attempt
    repeats: bool
    """Whether the device at fault computed wrong bits once more."""


class Judgement(NamedTuple):
    """The error of a faulty step, and whether the step is finished."""

    error: DeviceFaultError
    is_step_made: bool
    """Whether the step is finished before the error is raised."""


class DeviceVerification(Verification):
    """The choice of replica and devices, and the comparison of results."""

    def __init__(self, rate: float, placement: Placement) -> None:
        super().__init__(rate, placement)
        self._judgement: Judgement | None = None
        self._words = AttemptWords()

    @property
    def words(self) -> AttemptWords | None:
        """The digests that processes exchange. It is None if there is one process."""
        return self._words if self._placement.processes else None

    def begin(self) -> None:
        self._judgement = None
        self._words.own = NO_ATTEMPT

    def choose(self, step: int, batch_plan: BatchPlan) -> VerifiedReplica | None:
        """Choose the replica that a step verifies.

        Replicas take turns, and so do the devices. It is None if this process has no rows.
        """
        self.begin()
        owners = [part.device for part in batch_plan.parts for run in part.runs for _ in range(run.count)]
        if not owners:
            return None
        round_, place = divmod(self.count_turns(step), len(owners))
        devices = len(self._placement.devices)
        other = (owners[place] + 1 + round_ % (devices - 1)) % devices
        run = batch_plan.run_alone(batch_plan.shards[place].replica)
        return VerifiedReplica(step, run, owners[place], (owners[place], other))

    def begin_round(self, verified: VerifiedReplica, run_on: RunOn) -> None:
        """Compute nothing: each process verifies itself."""

    def judge(self, verified: VerifiedReplica, first: Attempt, run_on: RunOn) -> PackedTree:
        """Choose the contribution that counts, after a second device computed it."""
        second = run_on(verified.computed_by[1])
        if first.digest == second.digest:
            return first.contribution
        fault = self._find_fault(first, second, run_on)
        what = describe_contribution(verified)
        if fault is None:
            self._keep(Judgement(DeviceFaultError(self._describe_doubt(what, first, second)), is_step_made=False))
            return first.contribution
        self._keep(Judgement(DeviceFaultError(self._describe_fault(what, fault)), is_step_made=not fault.repeats))
        return fault.right.contribution

    def _keep(self, judgement: Judgement) -> None:
        """Keep a judgement until the sums of the step are there.

        The other processes learn from the all-reduce if the step is not finished.
        """
        self._judgement = judgement
        if not judgement.is_step_made:
            self._words.own = NOT_MADE

    def end_round(self, verified: VerifiedReplica) -> bool:
        """End a round. No other round follows: the step is judged when the replica is run."""
        return False

    def find_fault(self, verified: VerifiedReplica) -> DeviceFaultError | None:
        """Find the error to raise after the step. It is raised at once if the step must not be finished."""
        if self._judgement is None:
            return None
        if not self._judgement.is_step_made:
            raise self._judgement.error
        return self._judgement.error

    def check_processes(self) -> None:
        """Raise an error if another process does not finish the step."""
        if self._placement.processes is None or NOT_MADE not in self._words.received:
            return
        process = self._words.received.index(NOT_MADE)
        raise DeviceFaultError(
            f"A device of process {process} is at fault, and computes wrong bits again, or it is not known which of its devices is: the error "
            f"in process {process} names the devices. {UNFINISHED}"
        ) from (None if self._judgement is None else self._judgement.error)

    def _find_fault(self, first: Attempt, second: Attempt, run_on: RunOn) -> Fault | None:
        """Find which of two devices is at fault. It is None if more runs do not show it."""
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
        again = describe_repeat(fault.repeats, "leave the device out (devices=)")
        end = UNFINISHED if fault.repeats else FINISHED
        return f"{describe_fault(self._name_device(fault.wrong), what, self._name_device(fault.right))} {again} {end}"

    def _describe_doubt(self, what: str, first: Attempt, second: Attempt) -> str:
        one = self._name_device(first)
        other = self._name_device(second)
        return (
            f"{one} and {other} compute {what} with other bits, and more runs do not tell which of them is at fault. {UNFINISHED} Run "
            f"`unisono doctor` on each, and go on without the device whose self-test fails."
        )

    def _name_device(self, attempt: Attempt) -> str:
        return name_device(self._placement.devices[attempt.device])
