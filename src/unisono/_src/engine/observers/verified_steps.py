"""Steps that verify a replica. It is run by itself, on its device and elsewhere, beside the sums of its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unisono._src.engine.exchange.protocol import Words
from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.observers.lone_replicas import LoneReplicas
from unisono._src.engine.observers.verification import Attempt, DeviceFaultError, Verification, VerifiedReplica
from unisono._src.engine.step.observer import RunPhase, StepObserver, WatchedPhase, WatchedStep
from unisono._src.engine.step.plan import Round
from unisono._src.engine.step.program import CallResult
from unisono._src.engine.step.run_outputs import RunOutput
from unisono._src.engine.step.step_digests import StepDigests
from unisono._src.placement import Placement
from unisono._src.typing import AnyArray


class VerifiedSteps(StepObserver):
    """The observer that verifies one replica of some steps."""

    runs_phases = True

    def __init__(self, verification: Verification, placement: Placement) -> None:
        self._verification = verification
        self._placement = placement
        self._replicas = LoneReplicas(placement)
        self._verified: VerifiedReplica | None = None
        self._fault: DeviceFaultError | None = None
        """To be raised when the step is finished: a device was found to be at fault."""

    def count_unwatched(self, step: int) -> int:
        return self._verification.count_unverified(step)

    def begin(self, constants: Sequence[AnyArray]) -> None:
        """Forget what an error may have left."""
        self._verified = self._fault = None
        self._verification.begin()

    def before_rows(self, step: WatchedStep) -> None:
        due = not self._verification.count_unverified(step.number)
        self._verified = self._verification.choose(step.number, step.batch_plan) if due else None

    def run_phase(self, phase: WatchedPhase, run: RunPhase) -> list[RunOutput]:
        """Run a phase, in rounds if it is verified. Phases take turns after all replicas have had theirs."""
        verified = self._verified
        if verified is None or phase.number != self._count_turns(verified) % phase.phases:
            return run(None)
        lone = VerifiedRun(verified, phase, self._verification, self._replicas)
        while True:
            self._verification.begin_round(verified, lone.compute_on)
            outputs = run(lone)
            if not self._verification.end_round(verified):
                self._fault = self._verification.find_fault(verified)
                return outputs

    def _count_turns(self, verified: VerifiedReplica) -> int:
        """Count how often all replicas had their turn before."""
        return self._verification.count_turns(verified.step) // self._placement.replicas

    def list_words(self, batch: GlobalBatch, digest_program: Callable[[], int]) -> list[Words]:
        words = self._verification.words
        return [] if words is None else [words]

    def after_phases(self) -> None:
        self._verification.check_processes()

    def after_steps(self, batches: Sequence[GlobalBatch], digests: Sequence[StepDigests]) -> None:
        fault, self._fault, self._verified = self._fault, None, None
        if fault is not None:
            raise fault

    def forget(self) -> None:
        self._replicas.forget()


class VerifiedRun(NamedTuple):
    """The verified replica, in one phase of one step."""

    verified: VerifiedReplica
    phase: WatchedPhase
    verification: Verification
    replicas: LoneReplicas

    @property
    def replica(self) -> int:
        return self.verified.replica

    def runs(self, round_: Round) -> bool:
        """Whether a call runs the replica."""
        return any(run is not None and run.first == self.replica for run in round_.runs)

    def run(self, round_: Round) -> CallResult:
        """Run the replica and add its contribution to its device's sums.

        This is done in the replica's process, and in the order of the round.
        """
        device = self.verified.device
        run = round_.runs[device]
        assert run is not None
        first, done = self._run_on(device)
        contribution = self.verification.judge(self.verified, first, self.compute_on)
        self.replicas.add_contribution(device, self.phase, run, contribution, round_.is_last[device])
        return done

    def compute_on(self, index: int) -> Attempt:
        """Compute the contribution on a device."""
        return self._run_on(index)[0]

    def _run_on(self, index: int) -> tuple[Attempt, CallResult]:
        return self.replicas.run(index, self.phase, self.replica)
