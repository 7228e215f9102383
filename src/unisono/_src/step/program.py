"""The step program: the one program of training and of evaluation, for replicas of one number of rows.

It is compiled once and does every part of a step: it counts divisors, runs replicas, adds their contributions, finishes the step,
and goes on to the next step, as its orders say. A device that runs all replicas of several steps and a device that runs a single
replica of one step run the same machine code, with other orders. That is why placements and the number of steps in a call
cannot change a bit: two programs of the same source could.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax

from unisono._src.native.step_memory import open_step_memory
from unisono._src.packing import unpack_tree
from unisono._src.replica.contribution import Contribution
from unisono._src.replica.protocol import ReplicaComputation, State
from unisono._src.step import running_sums
from unisono._src.step.digest_stage import DigestStage
from unisono._src.step.step_digests import StepDigests
from unisono._src.typed_jax import (
    eval_shape,
    fori_loop,
    map_tree,
    optimization_barrier,
    take_index,
    update_index,
)
from unisono._src.typing import Array, Logs, PyTree
from unisono._src.xla.rewrite import uses_kernels

Whole: TypeAlias = int | Array
"""A whole number; a tracer inside of the program."""

ReplicaOutputs: TypeAlias = Sequence[Array]
"""The outputs of replicas, stacked."""

ContributionFunction: TypeAlias = Callable[..., tuple[Contribution, ReplicaOutputs]]
"""`Functions.contribution`, jitted."""


class CallOrders(NamedTuple):
    """The orders for one call; whole numbers. The order within a step is that of the fields from `counting` on."""

    steps: Whole = 1
    first: Whole = 0
    """The first replica that is run."""
    replicas: Whole = 0
    """The number of replicas that are run."""
    before: Whole = 0
    """The number of replicas that were added to the same sum already."""
    present: Whole = 0
    """The number of replicas of the global batch that have rows."""
    counting: Whole = 0
    """1 where divisors are counted; they are used at once where replicas are run as well."""
    running: Whole = 0
    """1 where replicas are run."""
    summing: Whole = 0
    """1 where the running sum is complete after these replicas."""
    finishing: Whole = 0
    """1 where the sum is that of all replicas, and ends the step."""


class StepBuffers(NamedTuple):
    """The device state that a call starts from and leaves behind; its memory is donated."""

    state: State
    contributions: running_sums.Sums
    divisors: running_sums.Sums
    """Empty where shapes alone decide the divisors."""


class CallResult(NamedTuple):
    """The results of a call beside `StepBuffers`."""

    logs: Logs
    """Valid only where the step was finished."""
    disagree: list[Array]
    """For each counter whether replicas disagreed on it."""
    outputs: ReplicaOutputs
    """The outputs of the replicas that were run, stacked; what lies behind the last of them must not be read."""
    digests: list[StepDigests]
    """One item, with a row for each step, where steps are recorded; else none."""


ShardOf: TypeAlias = Callable[[Array], PyTree]
"""A replica's number to its rows."""


class Carry(NamedTuple):
    """The values that one step of a call hands to the next step."""

    work: StepBuffers
    extras: Logs
    disagree: list[Array]
    outputs: ReplicaOutputs
    digests: list[StepDigests]


class StepProgram:
    """The step program as a function of Python."""

    def __init__(
        self,
        name: str,
        functions: ReplicaComputation,
        contribution: ContributionFunction,
        counted: bool,
        replicas: int,
        is_recorded: bool,
    ) -> None:
        self._functions = functions
        self._contribution = contribution
        self._counted = counted
        """Whether masks or weights decide divisors, so that they are counted on the devices."""
        self._replicas = replicas
        self._digest_stage = DigestStage(functions, replicas, is_recorded)
        self.__name__ = name

    def __call__(
        self, work: StepBuffers, order_values: Array, numbers: Array, divisors: Array, constants: Sequence[Array], batches: PyTree
    ) -> tuple[StepBuffers, CallResult]:
        """Run steps, or the part of a step that the orders say.

        Args:
            work: The device state before, and running sums.
            order_values: `CallOrders`, as one array.
            numbers: (a replica's row fraction, the rows of the global batch).
            divisors: The loss divisors, unless they are counted in the same call.
            constants: Arrays that are the same for every replica and step.
            batches: Arrays of shape (replica of step, row, ...): those of each step behind those of the step before.
        """
        orders = CallOrders(*(open_step_memory(order_values) if uses_kernels() else order_values))
        row_fraction, rows = numbers
        replica, outputs = self._make_shapes(work.state, batches, row_fraction, divisors, constants)
        extras = make_zeros(replica.logs)
        disagree = [jnp.zeros((), bool) for _ in replica.assigned.counter_changes]
        outputs = map_tree(lambda a: jnp.zeros((self._replicas, *a.shape), a.dtype), outputs)
        digests = self._digest_stage.make_room(work.state, replica, batches)

        def step(number: Array, carry: Carry) -> Carry:
            work, extras, disagree, outputs, digests = carry
            if self._functions.has_one_replica:
                return self._run_alone(carry, row_fraction, rows, divisors, constants, take_slot(batches, number), number, orders)
            offset = number * orders.replicas - orders.first
            shard_of: ShardOf = lambda replica: take_slot(batches, offset + replica)  # noqa: E731
            work, step_divisors = self._count_divisors(work, orders, row_fraction, divisors, constants, shard_of)
            work, outputs = self._run_replicas(work, outputs, orders, row_fraction, step_divisors, constants, shard_of)
            work, extras, disagree = self._finish(work, orders, rows, replica, extras, disagree)
            digests = self._digest_stage.put_sums(digests, number, orders.finishing, work.contributions, work.state, replica)
            return Carry(work, extras, disagree, outputs, digests)

        work, extras, disagree, outputs, digests = fori_loop(
            0, orders.steps, step, Carry(work, extras, disagree, outputs, digests)
        )
        return work, CallResult(self._make_logs(work.state, orders, extras), disagree, outputs, digests)

    def _make_shapes(
        self, state: State, batches: PyTree, row_fraction: Array, divisors: Array, constants: Sequence[Array]
    ) -> tuple[Contribution, ReplicaOutputs]:
        """Return a replica's contribution and outputs, in shapes."""
        batch = map_tree(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batches)
        return eval_shape(self._contribution, state, batch, jnp.int32(0), row_fraction, divisors, constants)

    def _count_divisors(
        self,
        work: StepBuffers,
        orders: CallOrders,
        row_fraction: Array,
        divisors: Array,
        constants: Sequence[Array],
        shard_of: ShardOf,
    ) -> tuple[StepBuffers, Array]:
        """Count the divisors if the orders say so; return the work and the divisors for the replicas of this call."""
        if not self._counted:
            return work, divisors

        def count(number: Array, sums: running_sums.Sums) -> running_sums.Sums:
            replica = orders.first + number
            terms = self._functions.divisors(work.state, shard_of(replica), replica, row_fraction, constants)
            vector = jnp.stack([jnp.float32(0 if d is None else d) for d in terms])
            return running_sums.push_value(sums, orders.before + number, {"float32": vector})

        sums = fori_loop(0, orders.replicas * orders.counting, count, work.divisors)
        added = orders.before + orders.replicas
        sums = running_sums.fold_sums(sums, jnp.where((orders.counting & orders.summing) == 1, added, 0))
        at_once = (orders.counting & orders.running) == 1
        (total,) = running_sums.get_place(sums).values()
        return work._replace(divisors=sums), jnp.where(at_once, total, divisors)

    def _run_replicas(
        self,
        work: StepBuffers,
        outputs: ReplicaOutputs,
        orders: CallOrders,
        row_fraction: Array,
        divisors: Array,
        constants: Sequence[Array],
        shard_of: ShardOf,
    ) -> tuple[StepBuffers, ReplicaOutputs]:
        def run(number: Array, carry: tuple[running_sums.Sums, ReplicaOutputs]) -> tuple[running_sums.Sums, ReplicaOutputs]:
            contributions, outputs = carry
            replica = orders.first + number
            result = self._contribution(work.state, shard_of(replica), replica, row_fraction, divisors, constants)
            contribution, output = optimization_barrier(result)  # how it is packed must not change how it is computed
            sums = running_sums.push_tree(contributions, orders.before + number, contribution)
            return sums, map_tree(lambda stacked, one: update_index(stacked, one, number, 0), outputs, output)

        contributions, outputs = fori_loop(0, orders.replicas * orders.running, run, (work.contributions, outputs))
        added = orders.before + orders.replicas
        complete = (orders.running & orders.summing) == 1
        return work._replace(contributions=running_sums.fold_sums(contributions, jnp.where(complete, added, 0))), outputs

    def _finish(
        self, work: StepBuffers, orders: CallOrders, rows: Array, like: Contribution, extras: Logs, disagree: list[Array]
    ) -> tuple[StepBuffers, Logs, list[Array]]:
        def end(_: Array, carry: tuple[State, Logs, list[Array]]) -> tuple[State, Logs, list[Array]]:
            state, _extras, disagree = carry
            total = unpack_tree(running_sums.get_place(work.contributions), like)
            new, differ = self._functions.finish_step(state, total, rows, cast(Array, orders.present))
            return keep_dtypes(new, state), total.logs, [a | b for a, b in zip(disagree, differ, strict=True)]

        state, extras, disagree = fori_loop(0, orders.finishing, end, (work.state, extras, disagree))
        return work._replace(state=state), extras, disagree

    def _run_alone(
        self,
        carry: Carry,
        row_fraction: Array,
        rows: Array,
        divisors: Array,
        constants: Sequence[Array],
        batch: PyTree,
        number: Array,
        orders: CallOrders,
    ) -> Carry:
        """Run the step of one replica: nothing is added."""
        work = carry.work
        replica = jnp.int32(0)
        by_itself = self._functions.run_alone(work.state, batch)
        if by_itself is not None:
            new, total = by_itself
            work = work._replace(state=keep_dtypes(new, work.state))
            digests = self._digest_stage.put_total(carry.digests, number, orders.finishing, total, work.state)
            return Carry(work, total.logs, [], (), digests)
        if self._counted:
            terms = self._functions.divisors(work.state, batch, replica, row_fraction, constants)
            divisors = jnp.stack([jnp.float32(0 if d is None else d) for d in terms])
        result = self._contribution(work.state, batch, replica, row_fraction, divisors, constants)
        total, outputs = optimization_barrier(result)
        new, differ = self._functions.finish_step(work.state, total, rows, jnp.int32(1))
        outputs = map_tree(lambda a: a[None], outputs)
        work = work._replace(state=keep_dtypes(new, work.state))
        digests = self._digest_stage.put_total(carry.digests, number, orders.finishing, total, work.state)
        return Carry(work, total.logs, differ, outputs, digests)

    def _make_logs(self, state: State, orders: CallOrders, extras: Logs) -> Logs:
        def results(*_: Array | Logs) -> Logs:
            return self._functions.results(state) | extras

        return fori_loop(0, orders.finishing, results, make_zeros(eval_shape(results)))


def take_slot(batches: PyTree, index: Array) -> PyTree:
    """Return the rows at an index of the first axis; an axis of one needs no index."""
    return map_tree(lambda a: a[0] if len(a) == 1 else take_index(a, index, keepdims=False), batches)


def make_zeros(like: PyTree) -> PyTree:
    return map_tree(lambda a: jnp.zeros(a.shape, a.dtype), like)


def keep_dtypes(new: PyTree, old: PyTree) -> PyTree:
    """Return the new arrays in the dtypes of the old ones: what a loop carries keeps its type."""
    return map_tree(lambda n, o: lax.convert_element_type(n, o.dtype), new, old)
