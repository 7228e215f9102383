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

from unisono.flat import flat, unflat
from unisono.replica import own_step
from unisono.replica.contribution import Contribution
from unisono.replica.program import ReplicaFunctions
from unisono.step import counter, finish

State = tuple[list[Any], ...]


class Orders(NamedTuple):
    """What one call does; whole numbers. The order within a step is that of the fields from `counting` on."""

    steps: Any = 1
    first: Any = 0
    """The first replica that is run."""
    count: Any = 0
    """How many are run."""
    before: Any = 0
    """How many replicas of the same sum stand in the counter already."""
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
    contributions: counter.Counter
    divisors: counter.Counter
    """Empty where shapes alone decide the divisors."""


class Block:
    """The program's function."""

    def __init__(self, functions: ReplicaFunctions, mode: str, contribution: Callable[..., Contribution], counted: bool) -> None:
        self._functions = functions
        self._mode = mode
        self._contribution = contribution
        self._counted = counted
        """Whether masks or weights decide divisors, so that they are counted on the devices."""
        self.__name__ = mode
        self.says_more = False
        """Whether logs hold more than the metrics say; known when the program was traced."""

    def __call__(self, work: Work, orders: Any, numbers: Any, given: Any, batches: Any) -> tuple[Work, dict[str, Any], list[Any]]:
        """
        Args:
            work: The state before, and counters.
            orders: `Orders`, as one array.
            numbers: (a replica's share of the rows, the rows of the global batch).
            given: The divisors of the loss terms, unless they are counted at once.
            batches: Arrays of shape (replica of step, row, ...): those of one step behind those of the step before.

        Returns:
            (work, logs, for each counter of the model whether replicas disagreed on it). Logs mean something where the step was
            finished.
        """
        orders, (share, rows) = Orders(*orders), numbers
        replica = self._contribution_of(work.state, batches, share, given)
        extras = zeros(replica.logs)
        self.says_more = bool(extras)
        disagree = [jnp.zeros((), bool) for _ in replica.assigned.counters]

        def step(number: Any, carry: Any) -> Any:
            work, extras, disagree = carry
            if self._functions.alone:
                return self._alone(work, share, rows, given, slot(batches, number))
            offset = number * orders.count - orders.first
            part = lambda r: slot(batches, offset + r)  # noqa: E731
            work, divisors = self._counted_divisors(work, orders, share, given, part)
            work = self._run(work, orders, share, divisors, part)
            return self._finished(work, orders, rows, replica, extras, disagree)

        work, extras, disagree = lax.fori_loop(0, orders.steps, step, (work, extras, disagree))
        return work, self._logs(work.state, orders, extras), disagree

    def _contribution_of(self, state: State, batches: Any, share: Any, given: Any) -> Contribution:
        """A replica's contribution, in shapes."""
        batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batches)
        return jax.eval_shape(self._contribution, state, batch, jnp.int32(0), share, given)

    def _counted_divisors(self, work: Work, orders: Orders, share: Any, given: Any, part: Any) -> tuple[Work, Any]:
        if not self._counted:
            return work, given

        def count(number: Any, divisors: Any) -> Any:
            found = self._functions.divisors(self._mode, work.state, part(orders.first + number), orders.first + number, share)
            found = jnp.stack([jnp.float32(0 if d is None else d) for d in found])
            return counter.pushed(divisors, orders.before + number, flat(found))

        divisors = lax.fori_loop(0, orders.count * orders.counting, count, work.divisors)
        there = orders.before + orders.count
        divisors = counter.folded(divisors, jnp.where((orders.counting & orders.summing) == 1, there, 0))
        at_once = (orders.counting & orders.running) == 1
        (found,) = counter.get(divisors, counter.digit_of_sum(there)).values()
        return work._replace(divisors=divisors), jnp.where(at_once, found, given)

    def _run(self, work: Work, orders: Orders, share: Any, divisors: Any, part: Any) -> Work:
        def run(number: Any, contributions: Any) -> Any:
            replica = orders.first + number
            contribution = self._contribution(work.state, part(replica), replica, share, divisors)
            return counter.pushed(contributions, orders.before + number, flat(contribution))

        contributions = lax.fori_loop(0, orders.count * orders.running, run, work.contributions)
        there = orders.before + orders.count
        complete = (orders.running & orders.summing) == 1
        return work._replace(contributions=counter.folded(contributions, jnp.where(complete, there, 0)))

    def _finished(self, work: Work, orders: Orders, rows: Any, like: Contribution, extras: Any, disagree: Any) -> Any:
        there = counter.digit_of_sum(orders.before + orders.count)

        def end(_: Any, carry: Any) -> Any:
            state, _extras, disagree = carry
            total = unflat(counter.get(work.contributions, there), like)
            new, differ = finish.finished(self._functions, self._mode, state, total, rows, orders.present)
            return as_before(new, state), total.logs, [a | b for a, b in zip(disagree, differ, strict=True)]

        state, extras, disagree = lax.fori_loop(0, orders.finishing, end, (work.state, extras, disagree))
        return work._replace(state=state), extras, disagree

    def _alone(self, work: Work, share: Any, rows: Any, given: Any, batch: Any) -> Any:
        """One replica is the step: nothing is added."""
        zero = jnp.int32(0)
        if own_step.is_own(self._functions.model, self._mode):
            new, extras = self._functions.own_step(self._mode, work.state, batch)
            return work._replace(state=as_before(new, work.state)), extras, []
        if self._counted:
            found = self._functions.divisors(self._mode, work.state, batch, zero, share)
            given = jnp.stack([jnp.float32(0 if d is None else d) for d in found])
        total = self._contribution(work.state, batch, zero, share, given)
        new, differ = finish.finished(self._functions, self._mode, work.state, total, rows, jnp.int32(1))
        return work._replace(state=as_before(new, work.state)), total.logs, differ

    def _logs(self, state: State, orders: Orders, extras: Any) -> dict[str, Any]:
        def results(*_: Any) -> dict[str, Any]:
            return finish.results(self._functions, state) | extras

        return lax.fori_loop(0, orders.finishing, results, zeros(jax.eval_shape(results)))


def slot(batches: Any, index: Any) -> Any:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), batches)


def zeros(like: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)


def as_before(new: Any, old: Any) -> Any:
    """In the dtypes of before: what a loop carries keeps its type."""
    return jax.tree.map(lambda n, o: lax.convert_element_type(n, o.dtype), new, old)
