"""The step of fit, evaluate and `run`: takes state and global batches, and returns the new state, logs and outputs of replicas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol, cast

import jax
import numpy as np

from unisono._src import packing
from unisono._src.data.global_batch import MANY, GlobalBatch, global_batch, sent
from unisono._src.exchange.protocol import Elsewhere, Exchange
from unisono._src.packing import Flat
from unisono._src.placement import Placement
from unisono._src.processes.progress import current
from unisono._src.replica.contribution import add
from unisono._src.replica.protocol import Functions, State
from unisono._src.step import running_sums
from unisono._src.step.constants import Numbers
from unisono._src.step.device_state import EmptySums, Held
from unisono._src.step.loss_divisors import Divisors, summed
from unisono._src.step.plan import Part, Plan, Run, plan
from unisono._src.step.probe_schedule import Looks
from unisono._src.step.program import Block, Done, Orders, ReplicaOutputs
from unisono._src.typing import AnyArray, Array, Logs, PyTree, Shape, UserBatch
from unisono._src.xla.interrupts import uninterrupted
from unisono._src.xla.programs import Program
from unisono._src.xla.rewrite import rewritten

CALL_BYTES = 2 * MANY  # so that rows which are read in place are those of one step
MOST_STEPS = 64


class Output(NamedTuple):
    """The outputs of a run of replicas, on their device."""

    device: int
    run: Run
    arrays: ReplicaOutputs
    """One array for each output, with a first axis of replicas; there may be room for more replicas than ran."""


class Carried(Protocol):
    """One array of the outputs of an earlier step, which replicas take as input."""

    def shapes(self, size: int) -> jax.ShapeDtypeStruct:
        """Return the shape of the value of a replica with this number of rows."""
        ...

    def on(self, device: int, run: Run) -> Array:
        """Return the values of a run of replicas, stacked."""
        ...


class Step:
    """Steps of a placement's replicas, whatever they compute.

    One device that runs all replicas, of equal size, takes several steps in one call. Otherwise devices run their subtrees and
    send the sums, and the homes of the exchange finish the step.
    """

    def __init__(
        self, name: str, functions: Functions, placement: Placement, exchange: Exchange, most_steps: int = MOST_STEPS
    ) -> None:
        """`name` is what profiles call the program. A call may take `most_steps`, and has room for the batches of all of them."""
        self._placement = placement
        self._most_steps = most_steps
        self._exchange = exchange
        self._functions = functions
        self._numbers = Numbers()
        self._plans = functools.cache(functools.partial(plan, placement=placement))
        self._held = Held(functions, placement, exchange.homes)
        self._divisors = Divisors(functions.divisors)
        self._name = name
        self._make_programs()
        self._take_program = Program(running_sums.get)
        self._put_program = Program(put_first, donate=(0,))
        self._add_program = Program(add)
        self._probe_schedule = Looks()
        self._has_state = False
        self._idle_batches: dict[tuple[int, Hashable], PyTree] = {}
        """Batches for calls that run no replica, by device and kind of rows."""
        self._output_shapes: dict[Hashable, list[jax.ShapeDtypeStruct]] = {}
        self._carried: Sequence[Carried] = ()

    def __call__(self, state: State, batches: Sequence[UserBatch], constants: Sequence[AnyArray] = ()) -> tuple[Logs, State]:
        """Return the logs after the last of the batches, and the state."""
        return self.outputs(state, [global_batch(batch) for batch in batches], constants)[0], self.state

    def outputs(
        self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = (), carried: Sequence[Carried] = ()
    ) -> tuple[Logs, list[Output]]:
        """Return the logs and the replicas' outputs of the last of the batches; the new state is then `self.state`.

        Replicas get a batch's rows, or (rows, values) where values of an earlier step are carried over.
        """
        logs = {}
        outputs = []
        self._has_state = False
        self._carried = carried
        self._held.keep(constants)
        while batches:
            if self._probe_schedule.is_due(self._functions.is_undecided):
                self._probe(batches[0], state)
            count = self._probe_schedule.count(len(batches), self._functions.is_looked_at, self._functions.is_undecided)
            now = batches[:count]
            batches = batches[count:]
            self._probe_schedule.note_trained(count)
            self._held.receive(state, functools.partial(self._make_empty_sums, state, now[0]))
            self._has_state = True
            for group in self._group_batches(now):
                whole = self._plan_of(group[0]).whole
                logs, disagree, outputs = self._at_once(group, whole) if whole else self._run_parts(group[0])
                self._functions.check(disagree)
            if batches:
                state = self.state
        return logs, outputs

    def _make_programs(self) -> None:
        functions = self._functions
        replicas = self._placement.replicas
        # Traced once, used twice; a new function each time, since JAX caches the traces of equal functions.
        self._contribution = jax.jit(functools.partial(functions.contribution))
        self._blocks = {counted: Block(self._name, functions, self._contribution, counted, replicas) for counted in (False, True)}
        self._programs = {
            counted: Program(rewritten(block, self._placement.lead.platform), donate=(0,))
            for counted, block in self._blocks.items()
        }

    def _probe(self, batch: GlobalBatch, state: State) -> None:
        """Probe a batch before it is trained on; make the programs anew where replicas then compute another program."""
        batch_plan = self._plan_of(batch)
        if not self._functions.alone:
            self._divisors_of(batch, batch_plan.size_at_end, state)  # its trace says what there is to probe
        if self._functions.look(state, batch.tree(), batch_plan.rows_of_replicas, cast(list[Array], self._held.constants())):
            self._make_programs()

    @property
    def state(self) -> State:
        """Return the newest state, on the lead device; empty where the last call stopped before it took the state that it was given."""
        return self._held.handed_out() if self._has_state else ()

    def holds(self, array: object) -> int:
        """Return how many references to an array of the state the step has."""
        return self._held.references(array)

    def output_shapes(self, batch: GlobalBatch, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the outputs of a replica with this number of rows."""
        key = rows, batch.signature, self._carried_shapes(rows)
        if key not in self._output_shapes:
            terms = np.zeros(len(self._divisors_of(batch, rows)), np.float32)
            arguments = self._input_shapes(batch, rows), np.int32(0), np.float32(1), terms, self._held.constants()
            self._output_shapes[key] = jax.eval_shape(self._contribution, self._held[0].state, *arguments)[1]
        return self._output_shapes[key]

    @property
    def says_more(self) -> bool:
        """Return whether logs have values that the metrics' state has not."""
        return any(block.says_more for block in self._blocks.values())

    def forget(self) -> None:
        """Drop what lies on the devices; the next step sends it again."""
        self._held.forget()
        self._idle_batches = {}
        self._has_state = False

    def _make_empty_sums(self, state: State, batch: GlobalBatch) -> EmptySums:
        """Return empty running sums for a contribution's shapes, which are the same for every number of rows."""
        if self._functions.alone:
            return {}, {}
        rows = self._plan_of(batch).size_at_end
        places = running_sums.places_for(self._placement.replicas)
        terms = np.zeros(len(self._divisors_of(batch, rows, state)), np.float32)
        arguments = self._input_shapes(batch, rows), np.int32(0), np.float32(1), terms, self._held.constants()
        like = jax.eval_shape(self._contribution, state, *arguments)[0]
        empty = {name: np.zeros((places, size), name) for name, size in packing.sizes(like).items()}
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

    def _plan_of(self, batch: GlobalBatch) -> Plan:
        return self._plans(batch.rows, batch.sizes)

    def _at_once(self, group: list[GlobalBatch], run: Run) -> tuple[Logs, list[Array], list[Output]]:
        """Run whole steps in one call, on the lead."""
        orders = Orders(steps=len(group), count=run.count, present=run.count, counting=1, running=1, summing=1, finishing=1)
        done = self._call(0, group, run, self._fixed_divisors(group[0], 0), orders)
        return done.logs, done.disagree, [Output(0, run, done.outputs)]

    def _run_parts(self, batch: GlobalBatch) -> tuple[Logs, list[Array], list[Output]]:
        """Run one step: the subtrees on their devices, the sums over devices, the end of the step on the homes."""
        batch_plan = self._plan_of(batch)
        divisors = {index: self._fixed_divisors(batch, index) for index in range(len(self._placement.devices))}
        for part in batch_plan.parts:
            if (
                part.runs
            ):  # sent before the lead runs: the state is donated to its call, and the new state is there only when the call ends
                self._held.on(part.device)
        if self._has_counted_divisors(batch):
            divisors = self._copy_to_devices(self._sum_parts(batch_plan, batch, divisors, counting=1)[0])
        totals, outputs = self._sum_parts(batch_plan, batch, divisors, running=1)
        end = Run(batch_plan.size_at_end, 0, 0, 0, range(0))
        results = {}
        for home, total in totals.items():
            work = self._held.on(home)
            device = self._placement.devices[home]
            with uninterrupted():
                contributions = self._put_program(device, None, work.contributions, total)
                self._held[home] = work._replace(contributions=contributions)
            results[home] = self._call(home, [batch], end, divisors[home], Orders(present=batch_plan.present, finishing=1))
        self._held.finished_on(totals)
        current().another_step_finished()
        return results[0].logs, results[0].disagree, outputs

    def _sum_parts(
        self, batch_plan: Plan, batch: GlobalBatch, divisors: dict[int, Array], **what: int
    ) -> tuple[dict[int, Flat], list[Output]]:
        """Return the total of what is counted or run, for each home, and the replicas' outputs."""
        nodes: list[dict[range, Flat | None]] = [{} for _ in self._placement.devices]
        outputs = []
        for part in batch_plan.parts:
            for run in part.runs:
                orders = Orders(
                    first=run.first,
                    count=run.count,
                    before=run.before,
                    present=batch_plan.present,
                    summing=int(run is part.runs[-1]),
                    **what,
                )
                done = self._call(part.device, [batch], run, divisors[part.device], orders)
                outputs.append(Output(part.device, run, done.outputs))
            nodes[part.device][part.span] = self._take_sum(part, "counting" in what) if part.runs else None
        kind = tuple(what)
        is_alone = len(batch_plan.of_processes) == 1
        description = None if is_alone else Elsewhere(batch_plan.of_processes, self._sum_shapes("counting" in what), batch)
        add = lambda device, left, right: self._add_program(device, kind, left, right)  # noqa: E731
        totals = self._exchange.total(nodes, add, batch_plan.leaves, description)
        return dict(zip(self._exchange.homes, totals, strict=True)), outputs

    def _take_sum(self, part: Part, divisors: bool) -> Flat:
        """Return the sum that a device has finished for a subtree."""
        work = self._held[part.device]
        device = self._placement.devices[part.device]
        return self._take_program(device, divisors, work.divisors if divisors else work.contributions)

    def _sum_shapes(self, divisors: bool) -> dict[str, jax.ShapeDtypeStruct]:
        """Return a contribution, or divisors, in shapes."""
        sums = self._held[0].divisors if divisors else self._held[0].contributions
        return {name: jax.ShapeDtypeStruct(places.shape[1:], places.dtype) for name, places in sums.items()}

    def _copy_to_devices(self, totals: dict[int, Flat]) -> dict[int, Array]:
        """Return the total of the divisors, on every device."""
        vectors = {home: total["float32"] for home, total in totals.items()}
        devices = self._placement.devices
        return {
            index: vectors[index] if index in vectors else jax.device_put(vectors[0], device)
            for index, device in enumerate(devices)
        }

    def _call(self, index: int, group: list[GlobalBatch], run: Run, divisors: Array, orders: Orders) -> Done:
        """Call the step program once, for replicas of this size."""
        device = self._placement.devices[index]
        batch = group[0]
        counted = self._has_counted_divisors(batch)
        key = run.size, batch.signature, self._carried_shapes(run.size), counted
        args = (
            self._held.on(index),
            self._numbers.on(device, np.int32, cast(tuple[int, ...], tuple(orders))),
            self._numbers.on(device, np.float32, (run.size / batch.rows, float(batch.rows))),
            divisors,
            self._held.constants(index),
            self._send_batches(index, key, group, run),
        )
        program = self._programs[counted].loaded(device, key, *args)
        with uninterrupted():
            self._held[index], done = program(*args)
        return done

    def _send_batches(self, index: int, key: Hashable, group: list[GlobalBatch], run: Run) -> PyTree:
        """Return the rows of a run of replicas, and the values that are carried over, on their device."""
        batch = group[0]
        device = self._placement.devices[index]
        row_shape = self._count_steps(batch, run) * self._placement.replicas, run.size
        if run.count:
            rows = sent(group, run.rows, row_shape, device)
            return (rows, [value.on(index, run) for value in self._carried]) if self._carried else rows
        if (index, key) not in self._idle_batches:  # nothing is read
            rows = sent([batch], range(0), row_shape, device)
            empty = []
            for shape in (value.shapes(run.size) for value in self._carried):
                empty.append(jax.device_put(np.zeros((self._placement.replicas, *shape.shape), shape.dtype), device))
            self._idle_batches[index, key] = (rows, empty) if self._carried else rows
        return self._idle_batches[index, key]

    def _count_steps(self, batch: GlobalBatch, run: Run) -> int:
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
        sums = summed([self._divisors_of(batch, size) for size in self._sizes(batch)])
        return self._numbers.on(self._placement.devices[index], np.float32, sums)

    def _has_counted_divisors(self, batch: GlobalBatch) -> bool:
        return any(None in self._divisors_of(batch, size) for size in set(self._sizes(batch)))

    def _sizes(self, batch: GlobalBatch) -> list[int]:
        """Return the number of rows of each replica that has rows."""
        return list(self._plan_of(batch).sizes)

    def _divisors_of(self, batch: GlobalBatch, rows: int, state: State | None = None) -> list[float | None]:
        def list_arguments() -> tuple[State, PyTree, Sequence[AnyArray]]:
            now = self._held[0].state if state is None else state
            return now, self._input_shapes(batch, rows), self._held.constants()

        return self._divisors.of((rows, batch.signature), list_arguments)


def put_first(contributions: running_sums.Sums, value: Flat) -> running_sums.Sums:
    return running_sums.put(contributions, 0, value)
