"""The step behind fit, evaluate and `run`: state and global batches in, state and what the replicas say out."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from unisono import flat
from unisono.data.division import GlobalBatch, global_batch, sent
from unisono.exchange.base import Exchange
from unisono.placement import Placement
from unisono.replica.base import Functions, State
from unisono.replica.contribution import Contribution, add
from unisono.step import counter
from unisono.step.block import Block, Done, Orders, Work
from unisono.step.copies import Numbers
from unisono.step.plan import Part, Plan, Run, plan
from unisono.xla.interrupts import uninterrupted
from unisono.xla.programs import Program
from unisono.xla.rewrite import rewritten

ROOM = 8 * 2**20
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

    def __init__(self, name: str, functions: Functions, placement: Placement, exchange: Exchange) -> None:
        """`name` is what profiles call the program."""
        self._placement = placement
        self._exchange = exchange
        self._functions = functions
        self._contribution = jax.jit(functions.contribution)  # traced once, read twice
        self._numbers = Numbers()
        self._plans = functools.cache(functools.partial(plan, placement=placement))
        self._looked = False
        self._divisors: dict[Any, list[float | None]] = {}
        self._blocks = {c: Block(name, functions, self._contribution, c, placement.replicas) for c in (False, True)}
        self._programs = {
            counted: Program(rewritten(block, placement.lead.platform), donate=(0,)) for counted, block in self._blocks.items()
        }
        self._take, self._put, self._add = Program(counter.get), Program(at_start, donate=(0,)), Program(add)
        self._held: dict[int, Work] = {}
        self._current: set[int] = set()
        """The devices that hold the state of now, not of a step before."""
        self._returned: list[Any] = []
        self._references: dict[int, int] = {}
        self._received = False
        self._idle: dict[Any, Any] = {}
        self._constants: dict[int, list[Any]] = {}
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
        self._received = False
        self._constants, self._carried = {0: list(constants)}, carried
        if not self._looked:
            self._functions.look(state, batches[0].tree(), self._constants[0])
            self._looked = True
        self._receive(state, batches[0])
        self._received = True
        for group in self._groups(batches):
            whole = self._plan(group[0]).whole
            logs, disagree, outputs = self._at_once(group, whole) if whole else self._in_parts(group[0])
            self._functions.check(disagree)
        return logs, outputs

    @property
    def state(self) -> State:
        """The newest state, on the lead device; nothing where the last call stopped before it took the state that it was given."""
        if not self._received:
            return ()
        self._returned = list(itertools.chain.from_iterable(self._held[0].state))
        self._references = {id(array): 2 for array in self._returned}  # that list, and what the lead holds
        return self._held[0].state

    def holds(self, array: Any) -> int:
        """How many references to an array of the state are the step's own."""
        return self._references.get(id(array), 0)

    @property
    def says_more(self) -> bool:
        """Whether logs hold what the metrics' state does not."""
        return any(block.says_more for block in self._blocks.values())

    def forget(self) -> None:
        """Lets go of what lies on the devices; the next step sends it again."""
        self._held, self._current, self._returned, self._idle, self._received = {}, set(), [], {}, False

    # What lies on the devices.

    def _receive(self, state: State, batch: GlobalBatch) -> None:
        """Takes the state from Keras' loop, which hands back what it was given unless a callback has assigned something."""
        leaves = list(itertools.chain.from_iterable(state))
        if (
            0 in self._held
            and len(leaves) == len(self._returned)
            and all(a is b for a, b in zip(leaves, self._returned, strict=True))
        ):
            return
        state = tuple(jax.device_put([list(group) for group in state], self._placement.lead))
        self._held[0] = Work(distinct(state), *self._counters(0, state, batch))
        self._current = {0}

    def _counters(self, index: int, state: State, batch: GlobalBatch) -> tuple[counter.Counter, counter.Counter]:
        if index in self._held:
            return self._held[index][1:]
        if self._functions.alone:
            return {}, {}
        digits, like = counter.digits_for(self._placement.replicas), self._like(state, batch)
        empty = {name: np.zeros((digits, size), name) for name, size in flat.sizes(like).items()}
        divisors = {"float32": np.zeros((digits, max(1, like.terms.size)), np.float32)}
        return jax.device_put((empty, divisors), self._placement.devices[index])

    def _like(self, state: State, batch: GlobalBatch) -> Contribution:
        """A contribution, in shapes, which are the same for every number of rows."""
        rows = self._plan(batch).size_at_end
        terms = np.zeros(len(self._divisors_of(batch, rows, state)), np.float32)
        like = self._shapes(batch, rows), np.int32(0), np.float32(1), terms, self._constants[0]
        return jax.eval_shape(self._contribution, state, *like)[0]

    def _on(self, index: int) -> Work:
        """What this device goes on from: the state as it is now, as far as its replicas read it."""
        if index not in self._current:
            state = self._held[0].state
            source = [list(group) if read else None for group, read in zip(state, self._read(index), strict=True)]
            scales = {(group, position): state[group][position] for group, position in self._functions.scales()}
            device = self._placement.devices[index]
            sent_groups, scales = jax.device_put((source, scales), device)
            if index not in self._held:
                idle = [[np.zeros(a.shape, a.dtype) for a in group] for group in state]
                counters = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self._held[0][1:])
                self._held[index] = Work(tuple(jax.device_put(idle, device)), *jax.device_put(counters, device))
            groups = [new if new is not None else old for new, old in zip(sent_groups, self._held[index].state, strict=True)]
            for (group, position), value in scales.items():
                groups[group] = [*groups[group][:position], value, *groups[group][position + 1 :]]
            self._held[index] = self._held[index]._replace(state=tuple(groups))
            self._current.add(index)
        return self._held[index]

    def _read(self, index: int) -> list[bool]:
        """Which groups of the state this device reads, beside scales: all where it finishes steps."""
        return [index in self._exchange.homes or read for read in self._functions.read()]

    def _constants_on(self, index: int) -> list[Any]:
        if index not in self._constants:
            self._constants[index] = jax.device_put(self._constants[0], self._placement.devices[index])
        return self._constants[index]

    # Steps.

    def _groups(self, batches: list[GlobalBatch]) -> Iterator[list[GlobalBatch]]:
        """Batches that one call can take."""
        for _, same in itertools.groupby(batches, key=lambda batch: (batch.rows, batch.sizes, batch.signature)):
            same = list(same)
            whole = self._plan(same[0]).whole
            most = steps_in(same[0], whole, self._placement.replicas) if whole else 1
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
                self._on(part.device)
        if self._is_counted(batch):
            given = self._everywhere(self._sums(now, batch, given, counting=1)[0])
        totals, outputs = self._sums(now, batch, given, running=1)
        end = Run(now.size_at_end, 0, 0, 0, range(0))
        results = {}
        for home, total in totals.items():
            work, device = self._on(home), self._placement.devices[home]
            with uninterrupted():
                contributions = self._put(device, None, work.contributions, total)
                self._held[home] = work._replace(contributions=contributions)
            # The total stands in the counter as if it were the sum of one.
            results[home] = self._call(home, [batch], end, given[home], Orders(before=1, present=now.present, finishing=1))
        self._current = set(totals)
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
        totals = self._exchange.total(nodes, lambda device, left, right: self._add(device, kind, left, right), now.leaves)
        return dict(zip(self._exchange.homes, totals, strict=True)), outputs

    def _sum_of(self, part: Part, divisors: bool) -> Any:
        work, device = self._held[part.device], self._placement.devices[part.device]
        digit = self._numbers.on(device, np.int32, counter.digit_of_sum(part.present))
        return self._take(device, divisors, work.divisors if divisors else work.contributions, digit)

    def _everywhere(self, totals: dict[int, Any]) -> dict[int, Any]:
        """One vector, on every device."""
        vectors = {home: total["float32"] for home, total in totals.items()}
        devices = self._placement.devices
        return {i: vectors[i] if i in vectors else jax.device_put(vectors[0], device) for i, device in enumerate(devices)}

    def _call(self, index: int, group: list[GlobalBatch], run: Run, given: Any, orders: Orders) -> Done:
        """One call of the program for replicas of this size."""
        device, batch = self._placement.devices[index], group[0]
        counted = self._is_counted(batch)
        carried = tuple((of.shape, str(of.dtype)) for of in (value.shapes(run.size) for value in self._carried))
        key = run.size, batch.signature, carried, counted
        args = (
            self._on(index),
            self._numbers.on(device, np.int32, tuple(orders)),
            self._numbers.on(device, np.float32, (run.size / batch.rows, float(batch.rows))),
            given,
            self._constants_on(index),
            self._batches(index, key, group, run),
        )
        program = self._programs[counted].loaded(device, key, *args)
        with uninterrupted():
            self._held[index], done = program(*args)
        return done

    def _batches(self, index: int, key: Any, group: list[GlobalBatch], run: Run) -> Any:
        batch, device = group[0], self._placement.devices[index]
        room = steps_in(batch, run, self._placement.replicas) * self._placement.replicas, run.size
        if run.count:
            rows = sent(group, run.rows, room, device)
            return (rows, [value.on(index, run) for value in self._carried]) if self._carried else rows
        if (index, key) not in self._idle:  # nothing is read
            rows, empty = sent([batch], range(0), room, device), []
            for of in (value.shapes(run.size) for value in self._carried):
                empty.append(jax.device_put(np.zeros((self._placement.replicas, *of.shape), of.dtype), device))
            self._idle[index, key] = (rows, empty) if self._carried else rows
        return self._idle[index, key]

    def _shapes(self, batch: GlobalBatch, rows: int) -> Any:
        """What a replica of so many rows gets, in shapes."""
        of_batch = batch.shapes(rows)
        return (of_batch, [value.shapes(rows) for value in self._carried]) if self._carried else of_batch

    # Divisors.

    def _given(self, batch: GlobalBatch, index: int) -> Any:
        """The divisors that shapes decide, on a device."""
        columns = zip(*(self._divisors_of(batch, size) for size in self._sizes(batch)), strict=True)
        sums = tuple(0.0 if None in column else float(sum(column)) for column in columns)
        return self._numbers.on(self._placement.devices[index], np.float32, sums)

    def _is_counted(self, batch: GlobalBatch) -> bool:
        return any(None in self._divisors_of(batch, size) for size in set(self._sizes(batch)))

    def _sizes(self, batch: GlobalBatch) -> list[int]:
        """The rows of each replica that has some."""
        return [run.size for part in self._plan(batch).parts for run in part.runs for _ in range(run.count)]

    def _divisors_of(self, batch: GlobalBatch, rows: int, state: State | None = None) -> list[float | None]:
        """What a replica of so many rows adds to the divisor of each loss term; None where masks or weights decide."""
        key = rows, batch.signature
        if key not in self._divisors:

            def look(*args: Any) -> None:
                found = self._functions.divisors(*args)
                self._divisors[key] = [0.0 if d is None else d if isinstance(d, float) else None for d in found]

            state = self._held[0].state if state is None else state
            jax.eval_shape(look, state, self._shapes(batch, rows), np.int32(0), np.float32(1), self._constants[0])
        return self._divisors[key]


def steps_in(batch: GlobalBatch, run: Run, replicas: int) -> int:
    """How many steps one call may take: a function of the run's shapes, for the program has room for so many."""
    return max(1, min(MOST_STEPS, ROOM // max(1, run.size * replicas * batch.row_bytes)))


def at_start(contributions: counter.Counter, value: Any) -> counter.Counter:
    return counter.put(contributions, 0, value)


def distinct(state: State) -> State:
    """Every array once: memory that is used again must not be two variables'."""
    seen: set[int] = set()

    def own(array: Any) -> Any:
        if id(array) in seen:
            return array.copy()
        seen.add(id(array))
        return array

    return jax.tree.map(own, state)
