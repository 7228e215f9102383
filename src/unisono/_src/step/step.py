"""The step behind fit, evaluate and `run`: state and global batches in, state and what the replicas say out."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from unisono._src import packing
from unisono._src.data.global_batch import MANY, GlobalBatch, global_batch, sent
from unisono._src.exchange.protocol import Elsewhere, Exchange
from unisono._src.placement import Placement
from unisono._src.processes.progress import current
from unisono._src.replica.contribution import add
from unisono._src.replica.protocol import Functions, State
from unisono._src.step import running_sums
from unisono._src.step.constants import Numbers
from unisono._src.step.device_state import Held
from unisono._src.step.loss_divisors import Divisors, summed
from unisono._src.step.plan import Part, Plan, Run, plan
from unisono._src.step.probe_schedule import Looks
from unisono._src.step.program import Block, Done, Orders
from unisono._src.xla.interrupts import uninterrupted
from unisono._src.xla.programs import Program
from unisono._src.xla.rewrite import rewritten

ROOM = 2 * MANY  # so that rows which are read in place are those of one step
MOST_STEPS = 64


class Output(NamedTuple):
    """What some neighbouring replicas gave back, on their device."""

    device: int
    run: Run
    arrays: Any
    """Behind one another; there may be room for more."""


class Carried(Protocol):
    """One array of the outputs of an earlier step, that replicas go on from."""

    def shapes(self, size: int) -> jax.ShapeDtypeStruct:
        """The value of a replica with so many rows."""
        ...

    def on(self, device: int, run: Run) -> jax.Array:
        """The values of neighbouring replicas, behind one another."""
        ...


class Step:
    """Steps of a placement's replicas, whatever they compute.

    One device that runs all replicas, of equal size, takes several steps in one call. Otherwise devices run their parts and
    hand on the sums, and the homes of the exchange finish the step.
    """

    def __init__(
        self, name: str, functions: Functions, placement: Placement, exchange: Exchange, most_steps: int = MOST_STEPS
    ) -> None:
        """`name` is what profiles call the program. `most_steps` a call may take, whose batches it then has room for."""
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
        self._take, self._put, self._add = Program(running_sums.get), Program(at_start, donate=(0,)), Program(add)
        self._looks = Looks()
        self._received = False
        self._idle: dict[Any, Any] = {}
        self._output_shapes: dict[Any, list[jax.ShapeDtypeStruct]] = {}
        self._carried: Sequence[Carried] = ()

    def __call__(self, state: State, batches: Sequence[Any], constants: Sequence[Any] = ()) -> tuple[dict[str, Any], State]:
        """The logs after the last of the batches, and the state."""
        return self.outputs(state, [global_batch(batch) for batch in batches], constants)[0], self.state

    def outputs(
        self, state: State, batches: list[GlobalBatch], constants: Sequence[Any] = (), carried: Sequence[Carried] = ()
    ) -> tuple[dict[str, Any], list[Output]]:
        """The logs and the replicas' outputs of the last of the batches; the state is then that of `self.state`.

        Replicas get a batch's rows, or (rows, values) where values of an earlier step are carried over.
        """
        logs, outputs = {}, []
        self._received, self._carried = False, carried
        self._held.keep(constants)
        while batches:
            if self._looks.is_due(self._functions.is_undecided):
                self._look_at(batches[0], state)
            count = self._looks.count(len(batches), self._functions.is_looked_at, self._functions.is_undecided)
            now, batches = batches[:count], batches[count:]
            self._looks.note_trained(count)
            self._held.receive(state, functools.partial(self._empty_sums, state, now[0]))
            self._received = True
            for group in self._groups(now):
                whole = self._plan(group[0]).whole
                logs, disagree, outputs = self._at_once(group, whole) if whole else self._in_parts(group[0])
                self._functions.check(disagree)
            if batches:
                state = self.state
        return logs, outputs

    def _make_programs(self) -> None:
        functions, replicas = self._functions, self._placement.replicas
        # Traced once, read twice; a function of its own each time, since JAX keeps traces of equal ones.
        self._contribution = jax.jit(functools.partial(functions.contribution))
        self._blocks = {c: Block(self._name, functions, self._contribution, c, replicas) for c in (False, True)}
        self._programs = {
            counted: Program(rewritten(block, self._placement.lead.platform), donate=(0,))
            for counted, block in self._blocks.items()
        }

    def _look_at(self, batch: GlobalBatch, state: State) -> None:
        """Before a batch is trained on, find out what replicas are to make of it."""
        now = self._plan(batch)
        if not self._functions.alone:
            self._divisors_of(batch, now.size_at_end, state)  # whose trace says what there is to look at
        if self._functions.look(state, batch.tree(), now.rows_of_replicas, self._held.constants()):
            self._make_programs()

    @property
    def state(self) -> State:
        """The newest state, on the lead device; nothing where the last call stopped before it took the state that it was given."""
        return self._held.handed_out() if self._received else ()

    def holds(self, array: Any) -> int:
        """How many references to an array of the state are the step's own."""
        return self._held.references(array)

    def output_shapes(self, batch: GlobalBatch, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Of what a replica with so many rows gives back."""
        key = rows, batch.signature, self._shapes_carried(rows)
        if key not in self._output_shapes:
            terms = np.zeros(len(self._divisors_of(batch, rows)), np.float32)
            given = self._shapes(batch, rows), np.int32(0), np.float32(1), terms, self._held.constants()
            self._output_shapes[key] = jax.eval_shape(self._contribution, self._held[0].state, *given)[1]
        return self._output_shapes[key]

    @property
    def says_more(self) -> bool:
        """Whether logs hold what the metrics' state does not."""
        return any(block.says_more for block in self._blocks.values())

    def forget(self) -> None:
        """Lets go of what lies on the devices; the next step sends it again."""
        self._held.forget()
        self._idle, self._received = {}, False

    def _empty_sums(self, state: State, batch: GlobalBatch) -> Any:
        """Empty ones, for a contribution's shapes, which are the same for every number of rows."""
        if self._functions.alone:
            return {}, {}
        rows, height = self._plan(batch).size_at_end, running_sums.places_for(self._placement.replicas)
        terms = np.zeros(len(self._divisors_of(batch, rows, state)), np.float32)
        given = self._shapes(batch, rows), np.int32(0), np.float32(1), terms, self._held.constants()
        like = jax.eval_shape(self._contribution, state, *given)[0]
        empty = {name: np.zeros((height, size), name) for name, size in packing.sizes(like).items()}
        return empty, {"float32": np.zeros((height, max(1, terms.size)), np.float32)}

    # Steps.

    def _groups(self, batches: list[GlobalBatch]) -> Iterator[list[GlobalBatch]]:
        """Batches that one call can take."""
        for _, same in itertools.groupby(batches, key=lambda batch: (batch.rows, batch.sizes, batch.signature)):
            same = list(same)
            whole = self._plan(same[0]).whole
            most = self._steps_in(same[0], whole) if whole else 1
            for start in range(0, len(same), most):
                yield same[start : start + most]

    def _plan(self, batch: GlobalBatch) -> Plan:
        return self._plans(batch.rows, batch.sizes)

    def _at_once(self, group: list[GlobalBatch], run: Run) -> tuple[dict[str, Any], list[Any], list[Output]]:
        orders = Orders(steps=len(group), count=run.count, present=run.count, counting=1, running=1, summing=1, finishing=1)
        done = self._call(0, group, run, self._given(group[0], 0), orders)
        return done.logs, done.disagree, [Output(0, run, done.outputs)]

    def _in_parts(self, batch: GlobalBatch) -> tuple[dict[str, Any], list[Any], list[Output]]:
        now = self._plan(batch)
        given = {index: self._given(batch, index) for index in range(len(self._placement.devices))}
        for part in now.parts:
            if part.runs:  # the state is sent before the lead runs, and takes it along: it is there again only when that is done
                self._held.on(part.device)
        if self._is_counted(batch):
            given = self._everywhere(self._sums(now, batch, given, counting=1)[0])
        totals, outputs = self._sums(now, batch, given, running=1)
        end = Run(now.size_at_end, 0, 0, 0, range(0))
        results = {}
        for home, total in totals.items():
            work, device = self._held.on(home), self._placement.devices[home]
            with uninterrupted():
                contributions = self._put(device, None, work.contributions, total)
                self._held[home] = work._replace(contributions=contributions)
            results[home] = self._call(home, [batch], end, given[home], Orders(present=now.present, finishing=1))
        self._held.finished_on(totals)
        current().another_step_finished()
        return results[0].logs, results[0].disagree, outputs

    def _sums(self, now: Plan, batch: GlobalBatch, given: dict[int, Any], **what: int) -> tuple[dict[int, Any], list[Output]]:
        """The total of what is counted or run, for each home, and the replicas' outputs."""
        nodes: list[dict[range, Any]] = [{} for _ in self._placement.devices]
        outputs = []
        for part in now.parts:
            for run in part.runs:
                orders = Orders(
                    first=run.first,
                    count=run.count,
                    before=run.before,
                    present=now.present,
                    summing=int(run is part.runs[-1]),
                    **what,
                )
                done = self._call(part.device, [batch], run, given[part.device], orders)
                outputs.append(Output(part.device, run, done.outputs))
            nodes[part.device][part.span] = self._sum_of(part, "counting" in what) if part.runs else None
        kind = tuple(what)
        is_alone = len(now.of_processes) == 1
        elsewhere = None if is_alone else Elsewhere(now.of_processes, self._like("counting" in what), batch)
        add = lambda device, left, right: self._add(device, kind, left, right)  # noqa: E731
        totals = self._exchange.total(nodes, add, now.leaves, elsewhere)
        return dict(zip(self._exchange.homes, totals, strict=True)), outputs

    def _sum_of(self, part: Part, divisors: bool) -> Any:
        work, device = self._held[part.device], self._placement.devices[part.device]
        return self._take(device, divisors, work.divisors if divisors else work.contributions)

    def _like(self, divisors: bool) -> Any:
        """A contribution, or divisors, in shapes."""
        of = self._held[0].divisors if divisors else self._held[0].contributions
        return {name: jax.ShapeDtypeStruct(held.shape[1:], held.dtype) for name, held in of.items()}

    def _everywhere(self, totals: dict[int, Any]) -> dict[int, Any]:
        """One vector, on every device."""
        vectors = {home: total["float32"] for home, total in totals.items()}
        devices = self._placement.devices
        return {i: vectors[i] if i in vectors else jax.device_put(vectors[0], device) for i, device in enumerate(devices)}

    def _call(self, index: int, group: list[GlobalBatch], run: Run, given: Any, orders: Orders) -> Done:
        """One call of the program for replicas of this size."""
        device, batch = self._placement.devices[index], group[0]
        counted = self._is_counted(batch)
        key = run.size, batch.signature, self._shapes_carried(run.size), counted
        args = (
            self._held.on(index),
            self._numbers.on(device, np.int32, tuple(orders)),
            self._numbers.on(device, np.float32, (run.size / batch.rows, float(batch.rows))),
            given,
            self._held.constants(index),
            self._batches(index, key, group, run),
        )
        program = self._programs[counted].loaded(device, key, *args)
        with uninterrupted():
            self._held[index], done = program(*args)
        return done

    def _batches(self, index: int, key: Any, group: list[GlobalBatch], run: Run) -> Any:
        batch, device = group[0], self._placement.devices[index]
        room = self._steps_in(batch, run) * self._placement.replicas, run.size
        if run.count:
            rows = sent(group, run.rows, room, device)
            return (rows, [value.on(index, run) for value in self._carried]) if self._carried else rows
        if (index, key) not in self._idle:  # nothing is read
            rows, empty = sent([batch], range(0), room, device), []
            for of in (value.shapes(run.size) for value in self._carried):
                empty.append(jax.device_put(np.zeros((self._placement.replicas, *of.shape), of.dtype), device))
            self._idle[index, key] = (rows, empty) if self._carried else rows
        return self._idle[index, key]

    def _steps_in(self, batch: GlobalBatch, run: Run) -> int:
        """How many steps one call may take: a function of the run's shapes, for the program has room for so many."""
        bytes_of_step = run.size * self._placement.replicas * batch.row_bytes
        return max(1, min(self._most_steps, ROOM // max(1, bytes_of_step)))

    def _shapes_carried(self, rows: int) -> tuple[Any, ...]:
        return tuple((of.shape, str(of.dtype)) for of in (value.shapes(rows) for value in self._carried))

    def _shapes(self, batch: GlobalBatch, rows: int) -> Any:
        """What a replica of so many rows gets, in shapes."""
        of_batch = batch.shapes(rows)
        return (of_batch, [value.shapes(rows) for value in self._carried]) if self._carried else of_batch

    # Divisors.

    def _given(self, batch: GlobalBatch, index: int) -> Any:
        """The divisors that shapes decide, on a device."""
        sums = summed([self._divisors_of(batch, size) for size in self._sizes(batch)])
        return self._numbers.on(self._placement.devices[index], np.float32, sums)

    def _is_counted(self, batch: GlobalBatch) -> bool:
        return any(None in self._divisors_of(batch, size) for size in set(self._sizes(batch)))

    def _sizes(self, batch: GlobalBatch) -> list[int]:
        """The rows of each replica that has some."""
        return list(self._plan(batch).sizes)

    def _divisors_of(self, batch: GlobalBatch, rows: int, state: State | None = None) -> list[float | None]:
        def arguments() -> tuple[Any, ...]:
            now = self._held[0].state if state is None else state
            return now, self._shapes(batch, rows), self._held.constants()

        return self._divisors.of((rows, batch.signature), arguments)


def at_start(contributions: running_sums.Sums, value: Any) -> running_sums.Sums:
    return running_sums.put(contributions, 0, value)
