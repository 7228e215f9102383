"""Steps that are not compiled: Python calls each replica's functions with arrays, and JAX runs one operation after another.

That is for breakpoints, prints and values that are known in `call`, in a loss or in replica code, and for code that cannot be compiled. All
replicas of a process run on its first device. Sums and rules are those of compiled steps; last bits are not, since XLA fuses operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono.cluster.watch.progress import current
from unisono.data.division import GlobalBatch, global_batch, sent
from unisono.exchange.base import Exchange
from unisono.placement import Placement
from unisono.replica.base import Functions, State
from unisono.step.block import as_before
from unisono.step.copies import Numbers
from unisono.step.plan import Plan, Shard, plan
from unisono.step.replicas import Sum
from unisono.step.step import Carried, Output

NO_COPIES = 1 << 30
"""More references than anybody can hold: a state that no program writes into need not be copied."""


class Eager:
    """A function that is called as a `Program` is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, device: jax.Device, key: Hashable, *args: Any) -> Any:
        with jax.default_device(device):
            return self._function(*args)


class EagerStep:
    """What a `Step` is, of functions that are called with arrays."""

    says_more = True

    def __init__(self, functions: Functions, placement: Placement, exchange: Exchange) -> None:
        """`placement` and `exchange` have one device in each process."""
        self._functions = functions
        self._placement = placement
        self._plans = functools.cache(functools.partial(plan, placement=placement))
        self._numbers = Numbers()
        self._sum, self._sum_of_divisors = Sum(placement, exchange), Sum(placement, exchange)
        self._divisors: dict[Hashable, list[float | None]] = {}
        """What a replica adds to each divisor, by its rows; None where masks or weights decide."""
        self._looked = False
        self._state: State = ()

    def __call__(self, state: State, batches: Sequence[Any], constants: Sequence[Any] = ()) -> tuple[dict[str, Any], State]:
        """The logs after the last of the batches, and the state."""
        return self.outputs(state, [global_batch(batch) for batch in batches], constants)[0], self._state

    def outputs(
        self, state: State, batches: list[GlobalBatch], constants: Sequence[Any] = (), carried: Sequence[Carried] = ()
    ) -> tuple[dict[str, Any], list[Output]]:
        """The logs and the replicas' outputs of the last of the batches; the state is then that of `self.state`."""
        lead, logs, outputs = self._placement.lead, {}, []
        self._state = tuple(jax.device_put([list(group) for group in state], lead))
        constants = list(jax.device_put(list(constants), lead))
        with jax.default_device(lead):
            for batch in batches:
                logs, outputs = self._step(batch, constants, carried)
        return logs, outputs

    @property
    def state(self) -> State:
        """The newest state; nothing before the first step."""
        return self._state

    def holds(self, array: Any) -> int:
        """How many references to an array of the state may be there without harm."""
        return NO_COPIES

    def forget(self) -> None:
        """Lets go of the state."""
        self._state = ()

    def _step(self, batch: GlobalBatch, constants: list[Any], carried: Sequence[Carried]) -> tuple[dict[str, Any], list[Output]]:
        now = self._plans(batch.rows, batch.sizes)
        given = self._given(now, batch, carried)
        divisors = self._total_divisors(now, batch, given, constants)
        if not self._looked:
            self._functions.look(self._state, batch.tree(), now.first, constants)
            self._looked = True
        by_itself = self._functions.alone_by_itself(self._state, given[0]) if self._functions.alone else None
        if by_itself is not None:
            self._state = as_before(by_itself[0], self._state)
            return self._functions.results(self._state) | by_itself[1], []
        found = {
            s.replica: self._functions.contribution(
                self._state, given[s.replica], self._number(s.replica), self._share(len(s.rows), batch), divisors, constants
            )
            for s in now.shards
        }
        contributions = {replica: contribution for replica, (contribution, _) in found.items()}
        like = self._like(self._functions.contribution, now, batch, carried, divisors, constants)[0] if not found else None
        total = self._sum(contributions, now, like or next(iter(contributions.values())), batch)[0]
        rows = self._numbers.on(self._placement.lead, np.float32, float(batch.rows))
        new, disagree = self._functions.finished(self._state, total, rows, self._number(now.present))
        self._functions.check(disagree)
        self._state = as_before(new, self._state)
        current().another_step_finished()
        outputs = [
            Output(part.device, run, stacked([found[replica][1] for replica in range(run.first, run.first + run.count)]))
            for part in now.parts
            for run in part.runs
        ]
        return self._functions.results(self._state) | total.logs, outputs

    def _given(self, now: Plan, batch: GlobalBatch, carried: Sequence[Carried]) -> dict[int, Any]:
        """What each replica gets: its rows, or (rows, values) where values of an earlier step are carried over."""
        lead, given = (
            self._placement.lead,
            {s.replica: sent([batch], s.rows, (len(s.rows),), self._placement.lead) for s in now.shards},
        )
        if not carried:
            return given
        for part in now.parts:
            for run in part.runs:
                values = jax.device_put([value.on(part.device, run) for value in carried], lead)
                for number in range(run.count):
                    replica = run.first + number
                    given[replica] = given[replica], [value[number] for value in values]
        return given

    def _total_divisors(self, now: Plan, batch: GlobalBatch, given: dict[int, Any], constants: list[Any]) -> Any:
        """By what each loss term of the global batch is divided."""
        found = {s.replica: as_vector(self._divisors_of(s, batch, given[s.replica], constants)) for s in now.shards}
        like = next(iter(found.values()), None)
        if like is None:
            like = self._like(lambda *args: as_vector(self._functions.divisors(*args)), now, batch, (), constants)
        return self._sum_of_divisors(found, now, like, batch)[0]

    def _divisors_of(self, shard: Shard, batch: GlobalBatch, given: Any, constants: list[Any]) -> Sequence[Any]:
        """What a replica adds to each divisor. Where shapes decide, that is asked for once, since it takes a forward pass."""
        size = len(shard.rows)
        found: Sequence[Any] | None = self._divisors.get((size, batch.signature))
        if found is None or None in found:
            found = self._functions.divisors(self._state, given, self._number(shard.replica), self._share(size, batch), constants)
            known = [0.0 if divisor is None else divisor if isinstance(divisor, float) else None for divisor in found]
            self._divisors[size, batch.signature] = known
        return found

    def _like(self, function: Callable[..., Any], now: Plan, batch: GlobalBatch, carried: Sequence[Carried], *more: Any) -> Any:
        """What a replica would return, in shapes: no replica of this process has rows."""
        size = now.sizes[0]
        rows: Any = batch.shapes(size)
        rows = (rows, [value.shapes(size) for value in carried]) if carried else rows
        return jax.eval_shape(function, self._state, rows, np.int32(0), np.float32(1), *more)

    def _number(self, value: int) -> Any:
        return self._numbers.on(self._placement.lead, np.int32, value)

    def _share(self, size: int, batch: GlobalBatch) -> Any:
        return self._numbers.on(self._placement.lead, np.float32, size / batch.rows)


def as_vector(divisors: Sequence[Any]) -> Any:
    """Return the divisors as an array; of none, one that is not read."""
    return jnp.array([0.0 if divisor is None else divisor for divisor in divisors] or [0.0], jnp.float32)


def stacked(outputs: Sequence[Any]) -> Any:
    """Return the outputs of replicas behind one another."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *outputs)
