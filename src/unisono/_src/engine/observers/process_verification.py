"""Verification between processes of one device each.

Another process computes the contribution of a replica again. Each process has the whole batch, so nothing is sent but digests,
and these go along with the all-reduce of the step. If they differ, all processes compute the step once more before it ends, and a
third process computes the contribution too. Then it is known which one is at fault.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

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


class Digests(NamedTuple):
    """The digests of one replica, by the processes that computed it. The third process has one in the second round alone."""

    owner: AttemptDigest
    other: AttemptDigest
    third: AttemptDigest


class ProcessVerification(Verification):
    """The choice of replica and processes, and the comparison of digests."""

    def __init__(self, rate: float, placement: Placement) -> None:
        super().__init__(rate, placement)
        assert placement.processes is not None
        self._processes = placement.processes
        self._rounds: list[Digests] = []
        self._words = AttemptWords()

    @property
    def words(self) -> AttemptWords:
        """The digests that processes exchange."""
        return self._words

    def choose(self, step: int, batch_plan: BatchPlan) -> VerifiedReplica | None:
        """Choose the replica that a step verifies. Replicas take turns, and so do the processes."""
        self._rounds = []
        round_, place = divmod(self.count_turns(step), batch_plan.present)
        run = batch_plan.run_alone(batch_plan.replicas[place])
        count = len(self._processes.counts)
        owner = next(number for number, block in enumerate(self._placement.of_processes) if run.first in block)
        others = [(owner + 1 + (round_ + number) % (count - 1)) % count for number in range(min(2, count - 1))]
        return VerifiedReplica(step, run, 0, (owner, *others))

    def begin_round(self, verified: VerifiedReplica, run_on: RunOn) -> None:
        """Compute another process's contribution, if it is this process's turn.

        A third process has its turn in the second round alone.
        """
        self._words.own = NO_ATTEMPT
        if self._processes.number in verified.computed_by[1 : 2 + len(self._rounds)]:
            self._tell(run_on(verified.device))

    def _tell(self, attempt: Attempt) -> None:
        """Send a contribution's digest with the next all-reduce."""
        self._words.own = shorten_digest(attempt.digest)

    def judge(self, verified: VerifiedReplica, first: Attempt, run_on: RunOn) -> PackedTree:
        """Pass on the contribution of this process's own replica. What others computed is known after the all-reduce."""
        self._tell(first)
        return first.contribution

    def end_round(self, verified: VerifiedReplica) -> bool:
        """Compare the digests of all processes. A step whose digests differ has a second round."""
        told = [self._words.received[process] for process in verified.computed_by]
        self._rounds.append(Digests(*told, *[NO_ATTEMPT] * (3 - len(told))))
        return len(self._rounds) == 1 and self._rounds[0].owner != self._rounds[0].other

    def find_fault(self, verified: VerifiedReplica) -> DeviceFaultError | None:
        """Find the error to raise after the step. It is raised at once if the step must not be finished."""
        if len(self._rounds) == 1:
            return None
        first, second = self._rounds
        if len(verified.computed_by) == 2:  # at fault is the process that contradicts itself
            is_owner = second.owner == first.other
            is_other = second.other == first.owner
        else:
            is_owner = second.third == first.other
            is_other = second.third == first.owner
        is_other = is_other and second.owner == first.owner
        owner, other = (name_device(self._processes.leads[process]) for process in verified.computed_by[:2])
        what = describe_contribution(verified)
        if not is_owner and not is_other:
            raise DeviceFaultError(
                f"{owner} and {other} compute {what} with other bits, and more runs do not tell which of them is at fault. {UNFINISHED} Run "
                f"`unisono doctor` on each, and go on without the device whose self-test fails."
            )
        wrong, right = (owner, other) if is_owner else (other, owner)
        repeats = second.owner != first.other if is_owner else second.other != first.owner
        end = UNFINISHED if repeats else FINISHED
        fault = DeviceFaultError(f"{describe_fault(wrong, what, right)} {describe_repeat(repeats, REMEDY)} {end}")
        if repeats:
            raise fault
        return fault  # the sum has the owner's second contribution, which is the right one

    def check_processes(self) -> None:
        """Raise nothing: all processes have judged by the same digests."""


REMEDY = "leave its process out"


def shorten_digest(digest: tuple[int, ...]) -> AttemptDigest:
    """Shorten a digest to two integers of 31 bits."""
    whole = hashlib.sha256(np.array(digest, np.int64).tobytes()).digest()
    one, other = (int.from_bytes(part, "little") >> 1 for part in (whole[:4], whole[4:8]))
    return one, other
