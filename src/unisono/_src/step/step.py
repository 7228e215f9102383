"""The step of fit, evaluate and `run`: takes state and global batches, and returns the new state, logs and outputs of replicas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol, cast

import jax
import numpy as np

from unisono._src import packing
from unisono._src.data.global_batch import IN_PLACE_BYTES, GlobalBatch, send_rows
from unisono._src.exchange.protocol import AddFunction, Exchange, SumDescription
from unisono._src.packing import PackedTree
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.replica.contribution import add_contributions
from unisono._src.replica.protocol import ReplicaComputation, State
from unisono._src.step import running_sums
from unisono._src.step.device_numbers import DeviceNumbers
from unisono._src.step.device_state import DeviceState, EmptySums
from unisono._src.step.loss_divisors import DivisorCache, sum_divisors
from unisono._src.step.plan import BatchPlan, ReplicaRun, Subtree, plan_batch
from unisono._src.step.probe_schedule import ProbeSchedule
from unisono._src.step.process_words import StepWords
from unisono._src.step.program import CallOrders, CallResult, ReplicaOutputs, StepProgram
from unisono._src.typed_jax import device_put, eval_shape, jit
from unisono._src.typing import AnyArray, Array, Logs, PyTree, Shape
from unisono._src.xla.interrupts import delay_interrupts
from unisono._src.xla.programs import DeviceProgram
from unisono._src.xla.rewrite import rewrite_function

CALL_BYTES = 2 * IN_PLACE_BYTES  # so that rows which are read in place are those of one step
MOST_STEPS = 64


class RunOutput(NamedTuple):
    """The outputs of a run of replicas, on their device."""

    device: int
    run: ReplicaRun
    arrays: ReplicaOutputs
    """One array for each output, with a first axis of replicas; there may be room for more replicas than ran."""


class CarriedValue(Protocol):
    """One array of the outputs of an earlier step, which replicas take as input."""

    def shapes(self, size: int) -> jax.ShapeDtypeStruct:
        """Return the shape of the value of a replica with this number of rows."""
        ...

    def on(self, device: int, run: ReplicaRun) -> Array:
        """Return the values of a run of replicas, stacked."""
        ...


class Step:
    """Steps of a placement's replicas, whatever they compute.

    One device that runs all replicas, of equal size, takes several steps in one call. Otherwise devices run their subtrees and
    send the sums, and the homes of the exchange finish the step.
    """

    def __init__(
        self, name: str, functions: ReplicaComputation, placement: Placement, exchange: Exchange, most_steps: int = MOST_STEPS
    ) -> None:
        """`name` is what profiles call the program. A call may take `most_steps`, and has room for the batches of all of them."""
        self._placement = placement
        self._most_steps = most_steps
        self._exchange = exchange
        self._functions = functions
        self._numbers = DeviceNumbers()
        self._plans = functools.cache(functools.partial(plan_batch, placement=placement))
        self._device_state = DeviceState(functions, placement, exchange.homes)
        self._divisors = DivisorCache(functions.divisors)
        self._name = name
        self._make_programs()
        self._take_program = DeviceProgram(running_sums.get_place)
        self._put_program = DeviceProgram(put_first, donate=(0,))
        self._add_program = DeviceProgram(add_contributions)
        self._probe_schedule = ProbeSchedule()
        self._has_state = False
        self._idle_batches: dict[tuple[int, Hashable], PyTree] = {}
        """Batches for calls that run no replica, by device and kind of rows."""
        self._output_shapes: dict[Hashable, list[jax.ShapeDtypeStruct]] = {}
        self._carried: Sequence[CarriedValue] = ()

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
        self._carried = carried
        self._device_state.keep(constants)
        while batches:
            if self._probe_schedule.is_due(self._functions.is_undecided):
                self._probe(batches[0], state)
            count = self._probe_schedule.count(len(batches), self._functions.needs_probe, self._functions.is_undecided)
            now = batches[:count]
            batches = batches[count:]
            self._probe_schedule.note_trained(count)
            self._device_state.receive_state(state, functools.partial(self._make_empty_sums, state, now[0]))
            self._has_state = True
            for group in self._group_batches(now):
                whole = self._plan_of(group[0]).whole
                logs, disagree, outputs = self._run_together(group, whole) if whole else self._run_parts(group[0])
                self._functions.check(disagree)
            if batches:
                state = self.state
        return logs, outputs

    def _make_programs(self) -> None:
        functions = self._functions
        replicas = self._placement.replicas
        # Traced once, used twice; a new function each time, since JAX caches the traces of equal functions.
        self._contribution = jit(functools.partial(functions.contribution))
        self._blocks = {
            counted: StepProgram(self._name, functions, self._contribution, counted, replicas) for counted in (False, True)
        }
        self._programs = {
            counted: DeviceProgram(rewrite_function(block, self._placement.lead.platform), donate=(0,))
            for counted, block in self._blocks.items()
        }

    def _probe(self, batch: GlobalBatch, state: State) -> None:
        """Probe a batch before it is trained on; make the programs anew where replicas then compute another program."""
        batch_plan = self._plan_of(batch)
        if not self._functions.has_one_replica:
            self._divisors_of(batch, batch_plan.size_at_end, state)  # its trace says what there is to probe
        if self._functions.probe(
            state, batch.tree(), batch_plan.rows_of_replicas, cast(list[Array], self._device_state.constants())
        ):
            self._make_programs()

    @property
    def state(self) -> State:
        """Return the newest state, on the lead device; empty where the last call stopped before it took the state that it was given."""
        return self._device_state.give_state() if self._has_state else ()

    def output_shapes(self, batch: GlobalBatch, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the outputs of a replica with this number of rows."""
        key = rows, batch.signature, self._carried_shapes(rows)
        if key not in self._output_shapes:
            terms = np.zeros(len(self._divisors_of(batch, rows)), np.float32)
            arguments = self._input_shapes(batch, rows), np.int32(0), np.float32(1), terms, self._device_state.constants()
            self._output_shapes[key] = eval_shape(self._contribution, self._device_state[0].state, *arguments)[1]
        return self._output_shapes[key]

    @property
    def has_more_logs(self) -> bool:
        """Return whether logs have values that the metrics' state has not."""
        return any(block.has_more_logs for block in self._blocks.values())

    def forget(self) -> None:
        """Drop what lies on the devices; the next step sends it again."""
        self._device_state.forget()
        self._idle_batches = {}
        self._has_state = False

    def _make_empty_sums(self, state: State, batch: GlobalBatch) -> EmptySums:
        """Return empty running sums for a contribution's shapes, which are the same for every number of rows."""
        if self._functions.has_one_replica:
            return {}, {}
        rows = self._plan_of(batch).size_at_end
        places = running_sums.count_places(self._placement.replicas)
        terms = np.zeros(len(self._divisors_of(batch, rows, state)), np.float32)
        arguments = self._input_shapes(batch, rows), np.int32(0), np.float32(1), terms, self._device_state.constants()
        like = eval_shape(self._contribution, state, *arguments)[0]
        empty = {name: np.zeros((places, size), name) for name, size in packing.measure_vectors(like).items()}
        return empty, {"float32": np.zeros((places, max(1, terms.size)), np.float32)}

    # Steps.

    def _group_batches(self, batches: list[GlobalBatch]) -> Iterator[list[GlobalBatch]]:
        """Yield lists of batches that one call can take."""
        for _, same in itertools.groupby(batches, key=lambda batch: (batch.rows, batch.sizes, batch.signature)):
            same = list(same)
            whole = self._plan_of(same[0]).whole
            most = self._count_steps(same[0], whole) if whole else 1
            for start in range(0, len(same), most):
                yield same[start : start + most]

    def _plan_of(self, batch: GlobalBatch) -> BatchPlan:
        return self._plans(batch.rows, batch.sizes)

    def _run_together(self, group: list[GlobalBatch], run: ReplicaRun) -> tuple[Logs, list[Array], list[RunOutput]]:
        """Run whole steps in one call, on the lead."""
        orders = CallOrders(
            steps=len(group), replicas=run.count, present=run.count, counting=1, running=1, summing=1, finishing=1
        )
        done = self._call(0, group, run, self._fixed_divisors(group[0], 0), orders)
        return done.logs, done.disagree, [RunOutput(0, run, done.outputs)]

    def _run_parts(self, batch: GlobalBatch) -> tuple[Logs, list[Array], list[RunOutput]]:
        """Run one step: the subtrees on their devices, the sums over devices, the end of the step on the homes."""
        batch_plan = self._plan_of(batch)
        divisors = {index: self._fixed_divisors(batch, index) for index in range(len(self._placement.devices))}
        for part in batch_plan.parts:
            if (
                part.runs
            ):  # sent before the lead runs: the state is donated to its call, and the new state is there only when the call ends
                self._device_state.on(part.device)
        if self._has_counted_divisors(batch):
            divisors = self._copy_to_devices(self._sum_parts(batch_plan, batch, divisors, counting=1)[0])
        totals, outputs = self._sum_parts(batch_plan, batch, divisors, running=1)
        end = ReplicaRun(batch_plan.size_at_end, 0, 0, 0, range(0))
        results: dict[int, CallResult] = {}
        for home, total in totals.items():
            work = self._device_state.on(home)
            device = self._placement.devices[home]
            with delay_interrupts():
                contributions = self._put_program(device, None, work.contributions, total)
                self._device_state[home] = work._replace(contributions=contributions)
            results[home] = self._call(home, [batch], end, divisors[home], CallOrders(present=batch_plan.present, finishing=1))
        self._device_state.note_finished(totals)
        get_activity().report_next_step()
        return results[0].logs, results[0].disagree, outputs

    def _sum_parts(
        self, batch_plan: BatchPlan, batch: GlobalBatch, divisors: dict[int, Array], **what: int
    ) -> tuple[dict[int, PackedTree], list[RunOutput]]:
        """Return the total of what is counted or run, for each home, and the replicas' outputs."""
        nodes: list[dict[range, PackedTree | None]] = [{} for _ in self._placement.devices]
        outputs: list[RunOutput] = []
        for part in batch_plan.parts:
            for run in part.runs:
                orders = CallOrders(
                    first=run.first,
                    replicas=run.count,
                    before=run.before,
                    present=batch_plan.present,
                    summing=int(run is part.runs[-1]),
                    **what,
                )
                done = self._call(part.device, [batch], run, divisors[part.device], orders)
                outputs.append(RunOutput(part.device, run, done.outputs))
            nodes[part.device][part.span] = self._take_sum(part, "counting" in what) if part.runs else None
        kind = tuple(what)
        shapes = self._sum_shapes("counting" in what)
        description = SumDescription(batch_plan.of_processes, shapes, StepWords(batch))
        add: AddFunction = lambda device, left, right: self._add_program(device, kind, left, right)  # noqa: E731
        totals = self._exchange.total(nodes, add, batch_plan.leaves, description)
        return dict(zip(self._exchange.homes, totals, strict=True)), outputs

    def _take_sum(self, part: Subtree, divisors: bool) -> PackedTree:
        """Return the sum that a device has finished for a subtree."""
        work = self._device_state[part.device]
        device = self._placement.devices[part.device]
        return self._take_program(device, divisors, work.divisors if divisors else work.contributions)

    def _sum_shapes(self, divisors: bool) -> dict[str, jax.ShapeDtypeStruct]:
        """Return a contribution, or divisors, in shapes."""
        sums = self._device_state[0].divisors if divisors else self._device_state[0].contributions
        return {name: jax.ShapeDtypeStruct(places.shape[1:], places.dtype) for name, places in sums.items()}

    def _copy_to_devices(self, totals: dict[int, PackedTree]) -> dict[int, Array]:
        """Return the total of the divisors, on every device."""
        vectors = {home: total["float32"] for home, total in totals.items()}
        devices = self._placement.devices
        return {
            index: vectors[index] if index in vectors else device_put(vectors[0], device) for index, device in enumerate(devices)
        }

    def _call(self, index: int, group: list[GlobalBatch], run: ReplicaRun, divisors: Array, orders: CallOrders) -> CallResult:
        """Call the step program once, for replicas of this size."""
        device = self._placement.devices[index]
        batch = group[0]
        counted = self._has_counted_divisors(batch)
        key = run.size, batch.signature, self._carried_shapes(run.size), counted
        args = (
            self._device_state.on(index),
            self._numbers.on(device, np.int32, cast(tuple[int, ...], tuple(orders))),
            self._numbers.on(device, np.float32, (run.size / batch.rows, float(batch.rows))),
            divisors,
            self._device_state.constants(index),
            self._send_batches(index, key, group, run),
        )
        program = self._programs[counted].find_or_load(device, key, *args)
        with delay_interrupts():
            self._device_state[index], done = program(*args)
        return done

    def _send_batches(self, index: int, key: Hashable, group: list[GlobalBatch], run: ReplicaRun) -> PyTree:
        """Return the rows of a run of replicas, and the values that are carried over, on their device."""
        batch = group[0]
        device = self._placement.devices[index]
        row_shape = self._count_steps(batch, run) * self._placement.replicas, run.size
        if run.count:
            rows = send_rows(group, run.rows, row_shape, device)
            return (rows, [value.on(index, run) for value in self._carried]) if self._carried else rows
        if (index, key) not in self._idle_batches:  # nothing is read
            rows = send_rows([batch], range(0), row_shape, device)
            empty: list[Array] = []
            for shape in (value.shapes(run.size) for value in self._carried):
                empty.append(device_put(np.zeros((self._placement.replicas, *shape.shape), shape.dtype), device))
            self._idle_batches[index, key] = (rows, empty) if self._carried else rows
        return self._idle_batches[index, key]

    def _count_steps(self, batch: GlobalBatch, run: ReplicaRun) -> int:
        """Return how many steps one call may take: a function of the run's shapes, since the program has room for this number."""
        bytes_of_step = run.size * self._placement.replicas * batch.row_bytes
        return max(1, min(self._most_steps, CALL_BYTES // max(1, bytes_of_step)))

    def _carried_shapes(self, rows: int) -> tuple[tuple[Shape, str], ...]:
        return tuple((shape.shape, str(shape.dtype)) for shape in (value.shapes(rows) for value in self._carried))

    def _input_shapes(self, batch: GlobalBatch, rows: int) -> PyTree:
        """Return the batch of a replica with this number of rows, in shapes."""
        batch_shapes = batch.shapes(rows)
        return (batch_shapes, [value.shapes(rows) for value in self._carried]) if self._carried else batch_shapes

    # Divisors.

    def _fixed_divisors(self, batch: GlobalBatch, index: int) -> Array:
        """Return the loss divisors as far as shapes decide them, on a device."""
        sums = sum_divisors([self._divisors_of(batch, size) for size in self._sizes(batch)])
        return self._numbers.on(self._placement.devices[index], np.float32, sums)

    def _has_counted_divisors(self, batch: GlobalBatch) -> bool:
        return any(None in self._divisors_of(batch, size) for size in set(self._sizes(batch)))

    def _sizes(self, batch: GlobalBatch) -> list[int]:
        """Return the number of rows of each replica that has rows."""
        return list(self._plan_of(batch).sizes)

    def _divisors_of(self, batch: GlobalBatch, rows: int, state: State | None = None) -> list[float | None]:
        def list_arguments() -> tuple[State, PyTree, Sequence[AnyArray]]:
            now = self._device_state[0].state if state is None else state
            return now, self._input_shapes(batch, rows), self._device_state.constants()

        return self._divisors.of((rows, batch.signature), list_arguments)


def put_first(contributions: running_sums.Sums, value: PackedTree) -> running_sums.Sums:
    return running_sums.set_place(contributions, 0, value)
