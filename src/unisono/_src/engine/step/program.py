"""The step program: one program for training and evaluation.

It is for shards of one number of rows, and is compiled once. It does every part of a step: it runs shards in each phase, adds
what they hand on, finishes the step, and goes on to the next step, as its orders say. A device that runs all replicas of several
steps and a device that runs a single replica in one phase of a step run the same machine code, with other orders. That is why
placements and the number of steps in a call cannot change a bit: two programs of the same source could.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from unisono._src.engine.packing import unpack_tree
from unisono._src.engine.phases.run import ShardPlace
from unisono._src.engine.state import State
from unisono._src.engine.step import running_sums
from unisono._src.engine.step.call_inputs import CallOrders, Whole
from unisono._src.engine.step.phased_steps import PhasedCut, WholeStep
from unisono._src.engine.step.run_outputs import ReplicaOutputs
from unisono._src.engine.step.step_digests import DigestStage, StepDigests
from unisono._src.engine.step.traced_step import Known, ShardWork, StepEnd
from unisono._src.kernels.before_gradient import uses_kernels
from unisono._src.kernels.native.step_calls import open_step_memory
from unisono._src.typed_jax import eval_shape, fori_loop, map_tree, optimization_barrier, take_index, update_index
from unisono._src.typing import Array, Logs, PyTree

T = TypeVar("T")


class StepBuffers(NamedTuple):
    """The device state that a call reads and replaces. Its memory is donated."""

    state: State
    sums: list[running_sums.Sums]
    """For each phase."""
    kept: dict[int, list[list[Array]]]
    """For each size of shards and each phase what they keep for later phases, stacked by replica."""


class CallResult(NamedTuple):
    """The results of a call beside `StepBuffers`."""

    logs: Logs
    """Valid only if the step was finished."""
    outputs: ReplicaOutputs
    """The outputs of the replicas that were run, stacked. The room behind the last one must not be read."""
    digests: list[StepDigests]
    """One item, with a row for each step, if steps are recorded. Else none."""


class Carry(NamedTuple):
    """The values that a step hands to the next one."""

    work: StepBuffers
    logs: Logs
    outputs: ReplicaOutputs
    digests: list[StepDigests]


class PhaseCarry(NamedTuple):
    """The values that a shard hands to the next one."""

    sums: running_sums.Sums
    outputs: ReplicaOutputs
    kept: list[Array]


class StepShapes(NamedTuple):
    """The results of the functions of a step, in shapes."""

    made: list[list[Array]]
    shards: list[ShardWork]
    outputs: list[Array]
    end: StepEnd


ShardOf: TypeAlias = Callable[[Array], PyTree]
"""A replica's number to its rows."""


class StepProgram:
    """The step program as a function of Python."""

    def __init__(self, name: str, cut: PhasedCut | WholeStep, replicas: int, is_recorded: bool) -> None:
        self._has_one_replica = replicas == 1
        self._cut = cast(PhasedCut, cut)
        self._alone = cast(WholeStep, cut)
        """The same, if it is a step of one replica."""
        self._replicas = replicas
        self._digest_stage = DigestStage(replicas, is_recorded, cut.cut_places)
        self.__name__ = name

    def __call__(
        self, work: StepBuffers, order_values: Array, constants: Sequence[Array], batches: PyTree
    ) -> tuple[StepBuffers, CallResult]:
        """Run steps, or the part of a step that the orders say.

        Args:
            work: The device state before, and running sums.
            order_values: `CallOrders` for the first step and for all others, as one array.
            constants: Arrays that are the same for every replica and step.
            batches: Arrays of shape (replica of step, row, ...): those of each step behind those of the step before.
        """
        all_orders = open_step_memory(order_values) if uses_kernels() else order_values
        known = Known(work.state, [], [], constants)
        batch_shapes = map_tree(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batches)
        like = self.describe(work.state, constants, batch_shapes)
        outputs = map_tree(lambda a: jnp.zeros((self._replicas, *a.shape), a.dtype), like.outputs)
        digests = self._digest_stage.make_room(like.end, batches)

        def step(number: Array, carry: Carry) -> Carry:
            orders = CallOrders(*take_index(all_orders, jnp.minimum(number, 1), keepdims=False))
            if self._has_one_replica:
                end, one = self._alone.run_alone(known._replace(state=carry.work.state), take_slot(batches, number))
                outputs = [output[None] for output in one]
                return self._hand_on(carry._replace(outputs=outputs), self._keep_dtypes(end, carry), number, orders.finishing)
            offset = (number - orders.since) * orders.replicas - orders.first
            carry, made = self._run_phases(carry, known, orders, lambda replica: take_slot(batches, offset + replica), like)
            end = self._finish(carry, known._replace(made=made), orders, like)
            return self._hand_on(carry, end, number, orders.finishing)

        start = Carry(work, make_zeros(like.end.logs), outputs, digests)
        work, logs, outputs, digests = fori_loop(0, CallOrders(*all_orders[0]).steps, step, start)
        return work, CallResult(logs, outputs, digests)

    def describe(self, state: State, constants: Sequence[Array], batch: PyTree) -> StepShapes:
        """Describe in shapes what the step's functions return. All arguments may be shapes."""
        known = Known(state, [], [], constants)
        if self._has_one_replica:
            end, outputs = eval_shape(self._alone.run_alone, known, batch)
            return StepShapes([], [], outputs, end)
        shards: list[ShardWork] = []
        for phase in range(self._cut.phases):
            made = eval_shape(functools.partial(self._cut.prepare, phase), known)
            known = known._replace(made=[*known.made, made])
            shards.append(self._cut.describe(phase, known, batch))
            known = known._replace(totals=[*known.totals, shards[-1].added])
        return StepShapes(known.made, shards, shards[-1].outputs, eval_shape(self._cut.finish, known))

    def _run_phases(
        self, carry: Carry, known: Known, orders: CallOrders, shard_of: ShardOf, like: StepShapes
    ) -> tuple[Carry, list[list[Array]]]:
        """Run the ordered phases and compute what comes before each."""
        known = known._replace(state=carry.work.state)
        work, outputs = carry.work, carry.outputs
        for phase in range(self._cut.phases):
            # Also for phases of earlier calls: a later phase and the end read what was computed before them.
            is_read = (phase < cast(Array, orders.end)) | (cast(Array, orders.finishing) == 1)
            known = known._replace(made=[*known.made, self._prepare(phase, known, is_read, work, like)])
            work, outputs = self._run_phase(phase, known, work, outputs, orders, shard_of, like)
        return carry._replace(work=work, outputs=outputs), known.made

    def _prepare(self, phase: int, known: Known, is_read: Array, work: StepBuffers, like: StepShapes) -> list[Array]:
        """Compute what a phase needs once, before its shards."""

        def prepare(number: Array, _: list[Array]) -> list[Array]:
            all_known = add_totals(known, work, like, phase)
            return self._cut.prepare(phase, stay_in_loop(number, all_known) if phase else all_known)

        # Once or not at all: the sums may be incomplete in a call that does not read these values.
        return fori_loop(0, is_read.astype(jnp.int32), prepare, make_zeros(like.made[phase])) if like.made[phase] else []

    def _run_phase(
        self,
        phase: int,
        known: Known,
        work: StepBuffers,
        outputs: ReplicaOutputs,
        orders: CallOrders,
        shard_of: ShardOf,
        like: StepShapes,
    ) -> tuple[StepBuffers, ReplicaOutputs]:
        """Run the shards of a phase, if ordered, and sum results."""
        is_on = ((phase >= cast(Array, orders.phase)) & (phase < cast(Array, orders.end))).astype(jnp.int32)
        is_last = phase == self._cut.phases - 1
        (size,) = {leaf.shape[0] for leaf in jax.tree.leaves(eval_shape(shard_of, jnp.int32(0)))[:1]}
        kept_so_far = work.kept[size][:phase] if size in work.kept else []

        def run(number: Array, carry: PhaseCarry) -> PhaseCarry:
            replica = orders.first + number
            place = ShardPlace(orders.place + number, orders.row + number * size, replica)
            own = map_tree(lambda stacked: take_index(stacked, replica, keepdims=False), kept_so_far)
            all_known = add_totals(known, work, like, phase)
            result = self._cut.run_shard(phase, all_known, shard_of(replica), own, place)
            added, one, kept = optimization_barrier(result)  # how it is packed must not change how it is computed
            return PhaseCarry(
                running_sums.push_tree(carry.sums, orders.before + number, added),
                map_tree(lambda stacked, array: update_index(stacked, array, number, 0), carry.outputs, one) if is_last else [],
                map_tree(lambda stacked, array: update_index(stacked, array, replica, 0), carry.kept, kept),
            )

        kept = work.kept[size][phase] if size in work.kept else []
        start = PhaseCarry(work.sums[phase], list(outputs) if is_last else [], kept)
        # No steps for a phase that is not ordered: orders change lengths of loops, and never the program.
        done = fori_loop(0, orders.replicas * is_on, run, start)
        # With 0 nothing is folded: later calls push more replicas onto the same stack.
        complete = jnp.where((is_on & orders.summing) == 1, orders.before + orders.replicas, 0)
        all_kept = {size: put_item(work.kept[size], phase, done.kept)} if size in work.kept else {}
        sums = running_sums.fold_sums(done.sums, complete)
        sums = put_item(work.sums, phase, running_sums.add_over_devices(sums, orders.group, orders.device, phase))
        return work._replace(sums=sums, kept=work.kept | all_kept), done.outputs if is_last else outputs

    def _finish(self, carry: Carry, known: Known, orders: CallOrders, like: StepShapes) -> StepEnd:
        """Compute the end of the step, if the orders end it."""

        def end(_: Array, before: StepEnd) -> StepEnd:
            all_known = add_totals(known._replace(state=before.state), carry.work, like, self._cut.phases)
            return self._keep_dtypes(self._cut.finish(all_known), carry)

        start = make_zeros(self._drop_untold(like.end))._replace(state=carry.work.state, logs=carry.logs)
        # Once or not at all: the same machine code runs calls that do not end the step.
        return fori_loop(0, orders.finishing, end, start)

    def _keep_dtypes(self, end: StepEnd, carry: Carry) -> StepEnd:
        """Convert the state of a step's end to its old dtypes."""
        return self._drop_untold(end)._replace(state=keep_dtypes(end.state, carry.work.state))

    def _drop_untold(self, end: StepEnd) -> StepEnd:
        """Drop gradients and loss of a step that is not recorded. A loop must not carry them."""
        return end if self._digest_stage.is_on else end._replace(gradients=[], loss=jnp.float32(0))

    def _hand_on(self, carry: Carry, end: StepEnd, number: Array, is_finished: Whole) -> Carry:
        """Build the carry of the next step."""
        digests = self._digest_stage.put(carry.digests, number, is_finished, end)
        return Carry(carry.work._replace(state=end.state), end.logs, carry.outputs, digests)


def stay_in_loop(number: Array, known: Known) -> Known:
    """Tie known values to a loop's step `number`.

    XLA hoists what does not depend on the step out of the loop. It would then be computed even if the loop has no steps, from
    incomplete sums. A loop on such sums may never end.
    """
    return optimization_barrier((known, number))[0]


def add_totals(known: Known, work: StepBuffers, like: StepShapes, count: int) -> Known:
    """Add the totals of the first phases to the known values.

    They are read inside each loop: outside of it they would be copied.
    """
    pairs = zip(work.sums[:count], like.shards, strict=False)
    return known._replace(totals=[unpack_tree(running_sums.get_place(sums), shard.added) for sums, shard in pairs])


def put_item(items: list[T], place: int, item: T) -> list[T]:
    """Replace the item at a position of a list."""
    return [*items[:place], item, *items[place + 1 :]]


def take_slot(batches: PyTree, index: Array) -> PyTree:
    """Take the rows at an index of the first axis. An axis of length one needs no index."""
    return map_tree(lambda a: a[0] if len(a) == 1 else take_index(a, index, keepdims=False), batches)


def make_zeros(like: T) -> T:
    return cast(T, map_tree(lambda a: jnp.zeros(a.shape, a.dtype), like))


def keep_dtypes(new: PyTree, old: PyTree) -> PyTree:
    """Convert new arrays to the dtypes of the old. The types of a loop's carry must not change."""
    return map_tree(lambda n, o: lax.convert_element_type(n, o.dtype), new, old)
