"""The one program of training and of evaluation, for replicas of one number of rows.

It is compiled once and plays every part: it counts divisors, runs replicas, adds up what they contribute, finishes the step,
and goes on to the next, as its orders say. A device that runs all replicas of several steps and one that runs a single
replica of one step run the same machine code, with other orders. That is why placements and the number of steps in a call
cannot change a bit: two programs of the same source could.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from unisono._src.packing import flat, unflat
from unisono._src.replica.contribution import Contribution
from unisono._src.replica.protocol import Functions, State
from unisono._src.step import running_sums


class Orders(NamedTuple):
    """What one call does; whole numbers. The order within a step is that of the fields from `counting` on."""

    steps: Any = 1
    first: Any = 0
    """The first replica that is run."""
    count: Any = 0
    """How many are run."""
    before: Any = 0
    """How many replicas of the same sum were added already."""
    present: Any = 0
    """How many replicas of the global batch have rows."""
    counting: Any = 0
    """1 where divisors are counted; they are used at once where replicas are run as well."""
    running: Any = 0
    summing: Any = 0
    """1 where the sum that was counted up is complete."""
    finishing: Any = 0
    """1 where the sum is that of all replicas, and ends the step."""


class Work(NamedTuple):
    """What a call goes on from and leaves behind; its memory is used again."""

    state: State
    contributions: running_sums.Sums
    divisors: running_sums.Sums
    """Empty where shapes alone decide the divisors."""


class Done(NamedTuple):
    """What a call leaves beside `Work`."""

    logs: dict[str, Any]
    """Mean something where the step was finished."""
    disagree: list[Any]
    """For each counter whether replicas disagreed on it."""
    outputs: Any
    """What the replicas that were run give back, behind one another; what lies behind the last of them is not to be read."""


class Block:
    """The program's function."""

    def __init__(self, name: str, functions: Functions, contribution: Callable[..., Any], counted: bool, replicas: int) -> None:
        self._functions = functions
        self._contribution = contribution
        self._counted = counted
        """Whether masks or weights decide divisors, so that they are counted on the devices."""
        self._replicas = replicas
        self.__name__ = name
        self.says_more = False
        """Whether logs hold more than the metrics say; known when the program was traced."""

    def __call__(self, work: Work, orders: Any, numbers: Any, given: Any, constants: Any, batches: Any) -> tuple[Work, Done]:
        """
        Args:
            work: The state before, and sums.
            orders: `Orders`, as one array.
            numbers: (a replica's share of the rows, the rows of the global batch).
            given: The divisors of the loss terms, unless they are counted at once.
            constants: Arrays that are the same for every replica and step.
            batches: Arrays of shape (replica of step, row, ...): those of one step behind those of the step before.
        """
        orders, (share, rows) = Orders(*orders), numbers
        replica, outputs = self._shapes(work.state, batches, share, given, constants)
        extras = zeros(replica.logs)
        self.says_more = bool(extras)
        disagree = [jnp.zeros((), bool) for _ in replica.assigned.counters]
        outputs = jax.tree.map(lambda a: jnp.zeros((self._replicas, *a.shape), a.dtype), outputs)

        def step(number: Any, carry: Any) -> Any:
            work, extras, disagree, outputs = carry
            if self._functions.alone:
                return self._alone(work, share, rows, given, constants, slot(batches, number))
            offset = number * orders.count - orders.first
            part = lambda r: slot(batches, offset + r)  # noqa: E731
            work, divisors = self._counted_divisors(work, orders, share, given, constants, part)
            work, outputs = self._run(work, outputs, orders, share, divisors, constants, part)
            return *self._finished(work, orders, rows, replica, extras, disagree), outputs

        work, extras, disagree, outputs = lax.fori_loop(0, orders.steps, step, (work, extras, disagree, outputs))
        return work, Done(self._logs(work.state, orders, extras), disagree, outputs)

    def _shapes(self, state: State, batches: Any, share: Any, given: Any, constants: Any) -> tuple[Contribution, Any]:
        """A replica's contribution and outputs, in shapes."""
        batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batches)
        return jax.eval_shape(self._contribution, state, batch, jnp.int32(0), share, given, constants)

    def _counted_divisors(
        self, work: Work, orders: Orders, share: Any, given: Any, constants: Any, part: Any
    ) -> tuple[Work, Any]:
        if not self._counted:
            return work, given

        def count(number: Any, divisors: Any) -> Any:
            replica = orders.first + number
            found = self._functions.divisors(work.state, part(replica), replica, share, constants)
            found = jnp.stack([jnp.float32(0 if d is None else d) for d in found])
            return running_sums.pushed(divisors, orders.before + number, {"float32": found})

        divisors = lax.fori_loop(0, orders.count * orders.counting, count, work.divisors)
        there = orders.before + orders.count
        divisors = running_sums.folded(divisors, jnp.where((orders.counting & orders.summing) == 1, there, 0))
        at_once = (orders.counting & orders.running) == 1
        (found,) = running_sums.get(divisors).values()
        return work._replace(divisors=divisors), jnp.where(at_once, found, given)

    def _run(
        self, work: Work, outputs: Any, orders: Orders, share: Any, divisors: Any, constants: Any, part: Any
    ) -> tuple[Work, Any]:
        def run(number: Any, carry: Any) -> Any:
            contributions, outputs = carry
            replica = orders.first + number
            found = self._contribution(work.state, part(replica), replica, share, divisors, constants)
            contribution, output = lax.optimization_barrier(found)  # how it is packed must not change how it is computed
            put = lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, number, 0)  # noqa: E731
            return running_sums.pushed(contributions, orders.before + number, flat(contribution)), jax.tree.map(
                put, outputs, output
            )

        contributions, outputs = lax.fori_loop(0, orders.count * orders.running, run, (work.contributions, outputs))
        there = orders.before + orders.count
        complete = (orders.running & orders.summing) == 1
        return work._replace(contributions=running_sums.folded(contributions, jnp.where(complete, there, 0))), outputs

    def _finished(self, work: Work, orders: Orders, rows: Any, like: Contribution, extras: Any, disagree: Any) -> Any:
        def end(_: Any, carry: Any) -> Any:
            state, _extras, disagree = carry
            total = unflat(running_sums.get(work.contributions), like)
            new, differ = self._functions.finished(state, total, rows, orders.present)
            return as_before(new, state), total.logs, [a | b for a, b in zip(disagree, differ, strict=True)]

        state, extras, disagree = lax.fori_loop(0, orders.finishing, end, (work.state, extras, disagree))
        return work._replace(state=state), extras, disagree

    def _alone(self, work: Work, share: Any, rows: Any, given: Any, constants: Any, batch: Any) -> Any:
        """One replica is the step: nothing is added."""
        zero = jnp.int32(0)
        by_itself = self._functions.alone_by_itself(work.state, batch)
        if by_itself is not None:
            new, extras = by_itself
            return work._replace(state=as_before(new, work.state)), extras, [], ()
        if self._counted:
            found = self._functions.divisors(work.state, batch, zero, share, constants)
            given = jnp.stack([jnp.float32(0 if d is None else d) for d in found])
        found = self._contribution(work.state, batch, zero, share, given, constants)
        total, outputs = lax.optimization_barrier(found)
        new, differ = self._functions.finished(work.state, total, rows, jnp.int32(1))
        outputs = jax.tree.map(lambda a: a[None], outputs)
        return work._replace(state=as_before(new, work.state)), total.logs, differ, outputs

    def _logs(self, state: State, orders: Orders, extras: Any) -> dict[str, Any]:
        def results(*_: Any) -> dict[str, Any]:
            return self._functions.results(state) | extras

        return lax.fori_loop(0, orders.finishing, results, zeros(jax.eval_shape(results)))


def slot(batches: Any, index: Any) -> Any:
    return jax.tree.map(lambda a: a[0] if len(a) == 1 else lax.dynamic_index_in_dim(a, index, keepdims=False), batches)


def zeros(like: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)


def as_before(new: Any, old: Any) -> Any:
    """In the dtypes of before: what a loop carries keeps its type."""
    return jax.tree.map(lambda n, o: lax.convert_element_type(n, o.dtype), new, old)
