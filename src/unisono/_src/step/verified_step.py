"""A step that verifies a replica: the replica is run by itself, on its device and elsewhere, beside the sums of its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from unisono._src.step.plan import Round
from unisono._src.step.program import CallResult
from unisono._src.step.single_replica import SingleReplicas
from unisono._src.step.verification import Attempt, DeviceFaultError, Verification, VerifiedReplica

Sums = TypeVar("Sums")


class VerifiedStep(NamedTuple):
    """One step, with what is verified in it."""

    verification: Verification
    replicas: SingleReplicas
    verified: VerifiedReplica
    phase: int
    call: Callable[[int], CallResult]
    """Runs the replica by itself on a device of this process."""

    @property
    def replica(self) -> int:
        return self.verified.replica

    def sum_rounds(self, sum_once: Callable[[], Sums]) -> tuple[Sums, DeviceFaultError | None]:
        """Return (the sums of the last round, the error to raise when the step is finished).

        `sum_once` computes the contributions of this process and their sums.
        """
        while True:
            self.verification.begin_round(self.verified, self._compute_on)
            sums = sum_once()
            if not self.verification.end_round(self.verified):
                return sums, self.verification.find_fault(self.verified)

    def runs(self, round_: Round) -> bool:
        """Return whether a call runs the replica that is verified."""
        return any(run is not None and run.first == self.replica for run in round_.runs)

    def run_replica(self, round_: Round) -> CallResult:
        """Run the replica in its own process, and add its contribution to the sums of its device, in the place that the round says."""
        device = self.verified.device
        run = round_.runs[device]
        assert run is not None
        first, done = self._run_on(device)
        contribution = self.verification.judge(self.verified, first, self._compute_on)
        self.replicas.add_contribution(device, self.phase, run, contribution, round_.is_last[device])
        return done

    def _compute_on(self, index: int) -> Attempt:
        return self._run_on(index)[0]

    def _run_on(self, index: int) -> tuple[Attempt, CallResult]:
        return self.replicas.run(index, self.phase, lambda: self.call(index))
