"""Verification between processes of one device each: another process computes the contribution of a replica again.

Each process reads the whole batch, so nothing is sent but digests, and these go along with the sum of the step. Where they differ, all
processes compute the step once more before it ends, and a third process computes the contribution too: then it is known which is at fault.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from unisono._src.packing import PackedTree
from unisono._src.placement import Placement
from unisono._src.step.plan import BatchPlan, ReplicaRun
from unisono._src.step.process_words import NO_ATTEMPT, AttemptDigest, AttemptWords
from unisono._src.step.verification import (
    FINISHED,
    Attempt,
    DeviceFaultError,
    RunOn,
    VerificationSchedule,
    describe_fault,
    name_device,
)


class ComparedReplica(NamedTuple):
    """The replica that a step verifies, and the processes that compute its contribution."""

    step: int
    run: ReplicaRun
    processes: tuple[int, ...]
    """The process of the replica, another process, and, where there are three or more, a process for the third opinion."""
    owner: int = 0
    """The device of each process."""

    @property
    def replica(self) -> int:
        return self.run.first


class Digests(NamedTuple):
    """The digests that the processes of a replica have told, in their order; that of a third process is told in the second round alone."""

    owner: AttemptDigest
    other: AttemptDigest
    third: AttemptDigest


class ProcessVerification(VerificationSchedule):
    """The choice of replica and processes, and the judgement of what the processes tell."""

    def __init__(self, rate: float, placement: Placement) -> None:
        super().__init__(rate, placement)
        assert placement.processes is not None
        self._processes = placement.processes
        self._rounds: list[Digests] = []
        self.words = AttemptWords()

    def choose(self, step: int, batch_plan: BatchPlan) -> ComparedReplica | None:
        """Return the replica that a step verifies: replicas take turns, and so do the processes. None where the step is not verified."""
        if self.count_unverified(step):
            return None
        self._rounds = []
        round_, place = divmod(self.count_turns(step), batch_plan.present)
        run = batch_plan.run_alone(place)
        count = len(self._processes.counts)
        owner = next(number for number, block in enumerate(self._placement.of_processes) if run.first in block)
        others = [(owner + 1 + (round_ + number) % (count - 1)) % count for number in range(min(2, count - 1))]
        return ComparedReplica(step, run, (owner, *others))

    def begin_round(self, compared: ComparedReplica) -> bool:
        """Begin a round of the step; return whether this process computes the contribution of another one's replica."""
        self.words.own = NO_ATTEMPT
        return self._processes.number in compared.processes[1 : 2 + len(self._rounds)]

    def note(self, attempt: Attempt) -> None:
        """Note what this process has computed: its digest is told with the sum."""
        self.words.own = shorten_digest(attempt.digest)

    def judge(self, _: ComparedReplica, first: Attempt, __: RunOn) -> tuple[PackedTree, None]:
        """Return the contribution of this process's own replica. What others have computed is known after the sum."""
        self.note(first)
        return first.contribution, None

    def end_round(self, compared: ComparedReplica) -> bool:
        """Take what all processes have told; return whether the step is to be computed once more."""
        told = [self.words.received[process] for process in compared.processes]
        self._rounds.append(Digests(*told, *[NO_ATTEMPT] * (3 - len(told))))
        return len(self._rounds) == 1 and self._rounds[0].owner != self._rounds[0].other

    def find_fault(self, compared: ComparedReplica) -> DeviceFaultError | None:
        """Return the error to raise when the step is finished. Raise it at once where the sum is not known to be right."""
        if len(self._rounds) == 1:
            return None
        first, second = self._rounds
        if len(compared.processes) == 2:  # at fault is the process that contradicts itself
            is_owner = second.owner == first.other
            is_other = not is_owner and second.other == first.owner
        else:
            is_owner = second.third == first.other
            is_other = second.third == first.owner
        is_right = second.owner == (first.other if is_owner else first.owner)
        owner, other = (name_device(self._processes.leads[process]) for process in compared.processes[:2])
        what = f"the contribution of replica {compared.replica} to step {compared.step}"
        if is_owner:
            end = FINISHED if is_right else UNFINISHED
            fault = DeviceFaultError(f"{describe_fault(owner, what, other)} {describe_repeat(is_right)} {end}")
        elif is_other and is_right:
            again = describe_repeat(second.other == first.owner)
            fault = DeviceFaultError(f"{describe_fault(other, what, owner)} {again} {FINISHED}")
        else:
            is_right = False
            fault = DeviceFaultError(
                f"{owner} and {other} compute {what} with other bits, and more runs do not tell which of them is at fault. {UNFINISHED} Run "
                f"`unisono doctor` on each, and go on without the device whose self-test fails."
            )
        if not is_right:
            raise fault
        return fault


UNFINISHED = "The step was not made: the state is that before it."


def describe_repeat(is_sound: bool) -> str:
    """Return whether a device has computed the right bits when it was asked again, and what to do."""
    if is_sound:
        return "It does not repeat there. If it comes again on this device, leave its process out."
    return "It computes wrong bits again: leave its process out, and go on."


def shorten_digest(digest: tuple[int, ...]) -> AttemptDigest:
    """Return a digest as two words of 31 bits."""
    whole = hashlib.sha256(np.array(digest, np.int64).tobytes()).digest()
    one, other = (int.from_bytes(part, "little") >> 1 for part in (whole[:4], whole[4:8]))
    return one, other
