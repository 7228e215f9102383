"""The step of fit, evaluate and `run`: takes state and global batches, and returns the new state, logs and outputs of replicas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import jax

from unisono._src.data.global_batch import GlobalBatch, want_row_digests
from unisono._src.exchange.protocol import Exchange
from unisono._src.packing import PackedTree
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.replica.protocol import ReplicaComputation, State
from unisono._src.step.call_inputs import CallInputs
from unisono._src.step.device_state import DeviceState
from unisono._src.step.loss_divisors import BatchDivisors, DivisorCache
from unisono._src.step.plan import BatchPlan, ReplicaRun, plan_batch, split_runs
from unisono._src.step.probe_schedule import ProbeSchedule
from unisono._src.step.program import CallOrders, CallResult
from unisono._src.step.program_calls import ProgramCalls
from unisono._src.step.recorder import StepRecorder
from unisono._src.step.run_outputs import CarriedValue, RunOutput
from unisono._src.step.single_replica import SingleReplicas
from unisono._src.step.step_digests import StepDigests
from unisono._src.step.step_inspection import open_inspection
from unisono._src.step.step_start import StepStart
from unisono._src.step.totals import DeviceTotal
from unisono._src.step.verification import DeviceFaultError, Verification, VerifiedReplica
from unisono._src.step.verified_step import VerifiedStep
from unisono._src.step_count import get_step_count
from unisono._src.typing import AnyArray, Array, Logs

MOST_STEPS = 64


class CallOutcome(NamedTuple):
    """The results of the steps of one call, or of one step on several devices."""

    logs: Logs
    disagree: list[Array]
    outputs: list[RunOutput]
    digests: list[StepDigests]
    fault: DeviceFaultError | None = None
    """To be raised now that the step is finished: a device was found to be at fault."""


class Step:
    """Steps of a placement's replicas, whatever they compute.

    One device that runs all replicas, of equal size, takes several steps in one call. Otherwise devices run their subtrees and
    send the sums, and the homes of the exchange finish the step.
    """

    def __init__(
        self,
        name: str,
        functions: ReplicaComputation,
        placement: Placement,
        exchange: Exchange,
        most_steps: int = MOST_STEPS,
        recorder: StepRecorder | None = None,
        verification: Verification | None = None,
        fixed_digest: int = 0,
    ) -> None:
        """`name` is what profiles call the program. A call may take `most_steps`, and has room for the batches of all of them.

        `recorder` is told of the steps that train, and `verification` chooses those that are verified. `fixed_digest` is of numbers that are
        the same for all replicas and part of the program.
        """
        self._name = name
        self._verification = verification
        self._recorder = recorder
        self._functions = functions
        self._placement = placement
        self._plans = functools.cache(functools.partial(plan_batch, placement=placement))
        self._inputs = CallInputs(placement, most_steps)
        self._device_state = DeviceState(functions, placement, exchange.homes)
        self._divisors = DivisorCache(functions.divisors, self._inputs)
        self._total_divisors = DeviceTotal(exchange)
        self._total_contribution = DeviceTotal(exchange)
        self._probe_schedule = ProbeSchedule()
        self._has_state = False
        self._single_replicas = SingleReplicas(placement, self._device_state)
        self._start = StepStart(placement, self._device_state, recorder, fixed_digest)
        self._inspection = None if recorder is None else open_inspection(functions, self._inputs)
        self._call = self._make_calls()

    def __call__(self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = ()) -> tuple[Logs, State]:
        """Return the logs after the last of the batches, and the state."""
        return self.outputs(state, batches, constants)[0], self.state

    def outputs(
        self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = (), carried: Sequence[CarriedValue] = ()
    ) -> tuple[Logs, list[RunOutput]]:
        """Return the logs and the replicas' outputs of the last of the batches; the new state is then `self.state`.

        Replicas get a batch's rows, or (rows, values) where values of an earlier step are carried over.
        """
        logs = {}
        outputs = []
        self._has_state = False
        if self._is_recorded:
            want_row_digests(batches)
        self._inputs.keep(constants, carried)
        self._start.receive_constants(constants)
        while batches:
            if self._probe_schedule.is_due(self._functions.is_undecided):
                self._probe(batches[0], state)
            verified = self._choose_verified(batches[0])
            count = 1 if verified else self._count_steps(len(batches))
            now = batches[:count]
            batches = batches[count:]
            self._probe_schedule.note_trained(count)
            self._start.receive_state(
                state, functools.partial(self._call.make_empty_sums, now[0], self._plan_of(now[0]).size_at_end, state)
            )
            self._has_state = True
            self._inspect(now[0])
            for group in self._group_batches(now):
                whole = None if verified else self._plan_of(group[0]).whole
                outcome = self._run_together(group, whole) if whole else self._run_parts(group[0], verified)
                logs, disagree, outputs, digests, fault = outcome
                self._functions.check(disagree)
                if self._recorder is not None:
                    self._recorder.note_steps(group, digests)
                if fault is not None:
                    raise fault
            if batches:
                state = self.state
        return logs, outputs

    @property
    def _is_recorded(self) -> bool:
        """Return whether digests of the steps are wanted."""
        return self._recorder is not None and self._recorder.is_on

    def _count_steps(self, most: int) -> int:
        """Return how many of the next steps may be taken until one is probed, verified or inspected, up to this number."""
        count = self._probe_schedule.count(most, self._functions.needs_probe, self._functions.is_undecided)
        step = get_step_count().steps
        if self._verification is not None:
            count = min(count, self._verification.count_unverified(step))
        if self._inspection is not None:
            count = min(count, self._inspection.count_uninspected(step))
        return max(1, count)

    def _choose_verified(self, batch: GlobalBatch) -> VerifiedReplica | None:
        """Return the replica that the next step verifies; None where it verifies none."""
        if self._verification is None:
            return None
        return self._verification.choose(get_step_count().steps, self._plan_of(batch))

    def _inspect(self, batch: GlobalBatch) -> None:
        """Have the next step inspected, if it is the one that is asked for."""
        if self._inspection is not None and not self._inspection.count_uninspected(get_step_count().steps):
            self._inspection.inspect(batch, self._plan_of(batch), self._device_state[0].state, self._place_divisors(batch, [0]))

    @property
    def state(self) -> State:
        """Return the newest state, on the lead device; empty where the last call stopped before it took the state that it was given."""
        return self._device_state.give_state() if self._has_state else ()

    def output_shapes(self, batch: GlobalBatch, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the outputs of a replica with this number of rows."""
        return self._call.output_shapes(batch, rows, self._device_state[0].state)

    @property
    def has_own_logs(self) -> bool:
        """Return whether logs are others than the results of the metrics; known after the first call."""
        return self._functions.has_own_logs

    def forget(self) -> None:
        """Drop what lies on the devices; the next step sends it again."""
        self._device_state.forget()
        self._inputs.forget()
        self._single_replicas.forget()
        self._has_state = False

    def _make_calls(self) -> ProgramCalls:
        return ProgramCalls(
            self._name, self._functions, self._placement, self._inputs, self._divisors, self._device_state, self._is_recorded
        )

    def _probe(self, batch: GlobalBatch, state: State) -> None:
        """Probe a batch before it is trained on; make the programs anew where replicas then compute another program."""
        batch_plan = self._plan_of(batch)
        if not self._functions.has_one_replica:
            self._divisors.of(batch, batch_plan.size_at_end, state)  # its trace says what there is to probe
        if self._functions.probe(state, batch.tree(), batch_plan.rows_of_replicas, cast(list[Array], self._inputs.constants())):
            self._call = self._make_calls()

    def _plan_of(self, batch: GlobalBatch) -> BatchPlan:
        return self._plans(batch.rows, batch.sizes)

    def _group_batches(self, batches: list[GlobalBatch]) -> Iterator[list[GlobalBatch]]:
        """Yield lists of batches that one call can take."""
        for _, same in itertools.groupby(batches, key=lambda batch: (batch.rows, batch.sizes, batch.signature)):
            same = list(same)
            whole = self._plan_of(same[0]).whole
            most = self._inputs.count_steps(same[0], whole) if whole else 1
            for start in range(0, len(same), most):
                yield same[start : start + most]

    def _run_together(self, group: list[GlobalBatch], run: ReplicaRun) -> CallOutcome:
        """Run whole steps in one call, on the lead."""
        orders = CallOrders(len(group), run.first, run.count, present=run.count, counting=1, running=1, summing=1, finishing=1)
        done = self._call(0, group, run, self._place_divisors(group[0], [0]), orders)
        return CallOutcome(done.logs, done.disagree, [RunOutput(0, run, done.outputs)], done.digests)

    def _run_parts(self, batch: GlobalBatch, verified: VerifiedReplica | None = None) -> CallOutcome:
        """Run one step: the subtrees on their devices, the sums over devices, the end of the step on the homes."""
        batch_plan = self._plan_of(batch)
        divisors = self._place_divisors(batch, range(len(self._placement.devices)))
        for part in batch_plan.parts:
            if (
                part.runs
            ):  # the state is sent before the lead runs: its call gets the memory, and leaves the new state when it ends
                self._device_state.on(part.device)
        end = ReplicaRun(batch_plan.size_at_end, 0, 0, 0, range(0))
        if self._placement.processes:
            self._start.receive_program(self._call.digest_finishing(batch, end, divisors))
        if divisors.are_counted:
            totals, _ = self._sum_parts(batch_plan, batch, divisors, counting=True)
            divisors = divisors.complete(totals, self._placement.devices)
        fault = None
        if verified is None:
            totals, outputs = self._sum_parts(batch_plan, batch, divisors, counting=False)
        else:
            step = self._open_verified(verified, batch_plan, batch, divisors)
            sum_once = functools.partial(self._sum_parts, batch_plan, batch, divisors, counting=False, verified=step)
            (totals, outputs), fault = step.sum_rounds(sum_once)
        if self._verification is not None:
            self._verification.check_processes()
        results: dict[int, CallResult] = {}
        for home, total in totals.items():
            self._device_state.put_total(home, total)
            results[home] = self._call(home, [batch], end, divisors, CallOrders(present=batch_plan.present, finishing=1))
        self._device_state.note_finished(totals)
        self._start.note_finished()
        get_activity().report_next_step()
        return CallOutcome(results[0].logs, results[0].disagree, outputs, results[0].digests, fault)

    def _place_divisors(self, batch: GlobalBatch, devices: Iterable[int]) -> BatchDivisors:
        return self._divisors.place(batch, self._plan_of(batch).sizes, self._device_state[0].state, devices)

    def _sum_parts(
        self,
        batch_plan: BatchPlan,
        batch: GlobalBatch,
        divisors: BatchDivisors,
        counting: bool,
        verified: VerifiedStep | None = None,
    ) -> tuple[dict[int, PackedTree], list[RunOutput]]:
        """Count divisors, or run replicas: return the total for each home, and the replicas' outputs."""
        nodes: list[dict[range, PackedTree | None]] = [{} for _ in self._placement.devices]
        outputs: list[RunOutput] = []
        for part in batch_plan.parts:
            runs = part.runs if verified is None else split_runs(part.runs, verified.replica)
            for run in runs:
                orders = CallOrders(
                    first=run.first,
                    replicas=run.count,
                    before=run.before,
                    present=batch_plan.present,
                    counting=int(counting),
                    running=int(not counting),
                    summing=int(run is runs[-1]),
                )
                if verified is not None and run.first == verified.replica:
                    done = verified.run_replica(run, is_last=run is runs[-1])
                else:
                    done = self._call(part.device, [batch], run, divisors, orders)
                outputs.append(RunOutput(part.device, run, done.outputs))
            nodes[part.device][part.span] = self._device_state.take_sum(part.device, counting) if part.runs else None
        add_up = self._total_divisors if counting else self._total_contribution
        attempt = None if self._verification is None or counting else self._verification.words
        return add_up(nodes, batch_plan, self._device_state.sum_shapes(counting), batch, self._start.digests, attempt), outputs

    def _open_verified(
        self, verified: VerifiedReplica, batch_plan: BatchPlan, batch: GlobalBatch, divisors: BatchDivisors
    ) -> VerifiedStep:
        """Return the step with what runs the replica that it verifies."""
        assert self._verification is not None
        orders = CallOrders(first=verified.replica, replicas=1, present=batch_plan.present, running=1, summing=1)

        def call(index: int) -> CallResult:
            return self._call(index, [batch], verified.run, divisors, orders)

        return VerifiedStep(self._verification, self._single_replicas, verified, call)
