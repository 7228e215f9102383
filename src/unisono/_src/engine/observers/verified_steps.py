"""Steps that verify a replica. It is run by itself, on its device and elsewhere, beside the sums of its device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.exchange.protocol import Words
from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.observers.verification import Attempt, DeviceFaultError, Verification, VerifiedReplica
from unisono._src.engine.packing import PackedTree
from unisono._src.engine.step import running_sums, step_digests
from unisono._src.engine.step.device_state import make_blocks
from unisono._src.engine.step.observer import RunPhase, StepObserver, WatchedPhase, WatchedStep
from unisono._src.engine.step.plan import ReplicaRun, Round
from unisono._src.engine.step.program import CallResult
from unisono._src.engine.step.run_outputs import RunOutput
from unisono._src.engine.step.step_digests import StepDigests
from unisono._src.engine.xla.programs import DeviceProgram
from unisono._src.kernels.rewriting import rewrite_function
from unisono._src.placement import Placement
from unisono._src.typed_jax import fori_loop, map_tree, optimization_barrier
from unisono._src.typing import AnyArray, Array


class LoneReplicas:
    """The contributions of single replicas, on the devices of a placement."""

    def __init__(self, placement: Placement) -> None:
        self._mesh = get_mesh(placement.devices)
        self._spare_sums: dict[int, running_sums.Sums] = {}
        """Room for a contribution by itself, by phase."""
        self._take_program = DeviceProgram(running_sums.get_place)
        self._add_program = DeviceProgram(add_one, donate=(0,), cut=True)
        self._digest_program = DeviceProgram(rewrite_function(digest_contribution, placement.lead.platform))

    def run(self, index: int, phase: WatchedPhase, replica: int) -> tuple[Attempt, CallResult]:
        """Run one replica in a phase, into sums of its own.

        The result is (its contribution, the result of its call). The sums of all devices stay as they are.
        """
        state, number = phase.device_state, phase.number
        sums = state.work.sums[number]
        like = state.describe_sums(number)
        spare = self._spare_sums.pop(number, None)
        if spare is None or map_tree(lambda a: a.shape[1:], spare) != map_tree(lambda a: a.shape, like):
            block = map_tree(lambda a: np.zeros((a.shape[0] // self._mesh.size, *a.shape[1:]), a.dtype), sums)
            spare = make_blocks(block, self._mesh)
        state.put_sums(number, spare)
        done = phase.call_alone(replica, index)
        spare = self._spare_sums[number] = state.work.sums[number]
        state.put_sums(number, sums)
        contribution = self._take_contribution(index, spare)
        return Attempt(index, contribution, self._digest(index, contribution)), done

    def _take_contribution(self, index: int, sums: running_sums.Sums) -> PackedTree:
        own = {name: self._mesh.list_blocks(array)[index] for name, array in sums.items()}
        return self._take_program(self._mesh.devices[index], describe_key(own), own)

    def _digest(self, index: int, contribution: PackedTree) -> tuple[int, ...]:
        """Digest a contribution on a device, and wait for it."""
        digests = self._digest_program(self._mesh.devices[index], describe_key(contribution), contribution)
        lanes: list[list[int]] = jax.device_get(digests).tolist()
        return tuple(itertools.chain.from_iterable(lanes))

    def add_contribution(self, index: int, phase: WatchedPhase, run: ReplicaRun, contribution: PackedTree, is_last: bool) -> None:
        """Add the contribution of one replica to a device's sums. The sums are completed if it is the last one."""
        complete = run.before + run.count if is_last else 0
        orders = [np.array([[run.before, complete, int(device == index)]], np.int32) for device in range(self._mesh.size)]
        sent = self._mesh.put_everywhere(map_tree(np.asarray, contribution))  # the right one may be another device's
        sums = phase.device_state.work.sums[phase.number]
        added = self._add_program(self._mesh, describe_key(contribution), sums, self._mesh.put_blocks(orders), sent)
        phase.device_state.put_sums(phase.number, added)

    def forget(self) -> None:
        """Drop what lies on the devices."""
        self._spare_sums = {}


def add_one(sums: running_sums.Sums, orders: Array, contribution: PackedTree) -> running_sums.Sums:
    """Add a contribution after others, on one device. The orders are (before, complete, whether this device adds it)."""
    before, complete, is_here = orders[0]

    def push(_: Array, sums: running_sums.Sums) -> running_sums.Sums:
        return running_sums.fold_sums(running_sums.push_value(sums, before, contribution), complete)

    return fori_loop(0, is_here, push, optimization_barrier(sums))


def describe_key(tree: PackedTree) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(sorted((name, vector.shape) for name, vector in tree.items()))


def digest_contribution(contribution: PackedTree) -> Array:
    """Compute the digests (dtype, lane) of a contribution."""
    return step_digests.digest_arrays([vector for _, vector in sorted(contribution.items())])


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

    def begin(self, batches: Sequence[GlobalBatch], constants: Sequence[AnyArray]) -> None:
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
