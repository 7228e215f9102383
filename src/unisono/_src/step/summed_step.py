"""A step as one sum of what replicas contribute, after a phase that counts divisors where masks or weights decide them."""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.phases.run import ShardPlace
from unisono._src.replica.contribution import Contribution, add_contributions
from unisono._src.replica.protocol import ReplicaComputation, State
from unisono._src.replica.same_draws import list_constant_draws
from unisono._src.step.call_inputs import CallInputs
from unisono._src.step.cut_step import InspectedProgram, Known, Part, ShardWork, StepEnd
from unisono._src.step.loss_divisors import DivisorCache, sum_divisors
from unisono._src.step.plan import BatchPlan
from unisono._src.typed_jax import eval_shape, jit, map_tree, optimization_barrier
from unisono._src.typing import AnyArray, Array, PyTree, Shape
from unisono._src.xla.rewrite import trace_as_rewritten


class SummedStep:
    """A step of replicas that contribute to one sum."""

    def __init__(self, functions: ReplicaComputation, is_counted: bool, platform: str) -> None:
        """`is_counted`: masks or weights decide divisors, so that a phase of their own counts them."""
        self._functions = functions
        self._is_counted = is_counted
        self._platform = platform
        self.phases = 2 if is_counted else 1
        # Traced once, used twice; a new function each time, since JAX caches the traces of equal functions.
        self._contribution = jit(functools.partial(functions.contribution))
        self._like: Contribution | None = None
        """A contribution, in shapes."""

    def trace(self, state: State, batch: PyTree, divisors: int, constants: Sequence[AnyArray]) -> tuple[ClosedJaxpr, PyTree]:
        """Return the program of a replica, and the shapes of what it returns."""
        numbers = np.int32(0), np.float32(1), np.zeros(divisors, np.float32)
        return trace_as_rewritten(self._contribution, self._platform)(state, batch, *numbers, constants)

    def describe(self, phase: int, known: Known, batch: PyTree) -> ShardWork:
        if phase < self.phases - 1:
            return ShardWork([eval_shape(take_divisors, known.numbers)], [], [])
        place = ShardPlace(jnp.int32(0), jnp.int32(0))
        self._like, outputs = eval_shape(self._contribute, known, batch, place.number)
        return ShardWork(jax.tree.leaves(self._like), list(outputs), [])

    def prepare(self, phase: int, known: Known) -> list[Array]:
        return []

    def run_shard(
        self, phase: int, known: Known, batch: PyTree, kept: Sequence[list[Array]], place: ShardPlace, replica: Array
    ) -> ShardWork:
        if phase < self.phases - 1:
            return ShardWork([self._count(known, batch, replica)], [], [])
        contribution, outputs = self._contribute(known, batch, replica)
        return ShardWork(jax.tree.leaves(contribution), list(outputs), [])

    def finish(self, known: Known, present: Array) -> StepEnd:
        assert self._like is not None  # described before
        total = jax.tree.unflatten(jax.tree.structure(self._like), known.totals[-1])
        return self._end(known, total, present)

    def run_alone(self, known: Known, batch: PyTree) -> tuple[StepEnd, list[Array]]:
        if self._is_counted:
            known = known._replace(totals=[[self._count(known, batch, jnp.int32(0))]])
        total, outputs = optimization_barrier(self._contribute(known, batch, jnp.int32(0)))
        return self._end(known, total, jnp.int32(1)), list(outputs)

    def _contribute(self, known: Known, batch: PyTree, replica: Array) -> tuple[Contribution, Sequence[Array]]:
        row_fraction, divisors = known.numbers[0], take_divisors(known.numbers)
        if self._is_counted:
            (divisors,) = known.totals[0]
        return self._contribution(known.state, batch, replica, row_fraction, divisors, known.constants)

    def _count(self, known: Known, batch: PyTree, replica: Array) -> Array:
        """Return the divisors of a replica, 0 for a term that has none."""
        divisors = self._functions.divisors(known.state, batch, replica, known.numbers[0], known.constants)
        return jnp.stack([jnp.float32(0 if divisor is None else divisor) for divisor in divisors])

    def _end(self, known: Known, total: Contribution, present: Array) -> StepEnd:
        state, disagree = self._functions.finish_step(known.state, total, known.numbers[1], present)
        loss = self._functions.read_loss(total, total)
        return StepEnd(state, self._functions.results(state) | total.logs, total.gradients, loss, disagree)


class SummedSteps:
    """The steps of one computation, by whether divisors are counted."""

    def __init__(self, functions: ReplicaComputation, inputs: CallInputs, platform: str) -> None:
        self._functions = functions
        self._inputs = inputs
        self._platform = platform
        self._divisors = DivisorCache(functions.divisors, inputs)
        self._steps = {is_counted: SummedStep(functions, is_counted, platform) for is_counted in (False, True)}

    def cut(self, batch: GlobalBatch, batch_plan: BatchPlan, state: State) -> SummedStep:
        """Return the step for a batch."""
        by_size = [self._divisors.of(batch, size, state) for size in set(batch_plan.sizes)]
        return self._steps[any(None in divisors for divisors in by_size)]

    def list_numbers(self, batch: GlobalBatch, batch_plan: BatchPlan, size: int, state: State) -> tuple[float, ...]:
        """Return the numbers that a program reads: a replica's row fraction, the rows of the batch, the divisors that shapes decide."""
        divisors = sum_divisors([self._divisors.of(batch, size, state) for size in batch_plan.sizes])
        return size / batch.rows, float(batch.counted_rows), *divisors

    def list_read(self, state: State) -> Set[tuple[int, int]]:
        """Return the arrays of the state that replicas read, by group and place in it."""
        groups = [group for group, is_read in enumerate(self._functions.read()) if is_read]
        return {(group, place) for group in groups for place in range(len(state[group]))} | set(self._functions.scales())

    def inspect(
        self, batch: GlobalBatch, batch_plan: BatchPlan, state: State, batches: Sequence[PyTree]
    ) -> tuple[list[Part], list[InspectedProgram]]:
        """Return what each shard of this process gives, and programs that compute it. `batches` are the rows of the shards."""
        divisors = np.array(self.list_numbers(batch, batch_plan, 1, state)[2:], np.float32)
        constants = cast(list[Array], self._inputs.constants())
        starts = [(jnp.int32(shard.replica), jnp.float32(len(shard.rows) / batch.rows)) for shard in batch_plan.shards]
        if self.cut(batch, batch_plan, state).phases > 1:
            counted = [
                [0 if term is None else term for term in self._functions.divisors(state, rows, *start, constants)]
                for rows, start in zip(batches, starts, strict=True)
            ]
            divisors = np.array(counted, np.float32).sum(axis=0)
        args = [(state, rows, *start, divisors, constants) for rows, start in zip(batches, starts, strict=True)]
        contribute = jit(functools.partial(self._functions.contribution))
        contributions = [contribute(*of_replica)[0] for of_replica in args]
        total = functools.reduce(add_contributions, [each._replace(gradients=[]) for each in contributions])
        parts: list[Part] = [(list(each.gradients), self._functions.read_loss(each, total)) for each in contributions]
        programs = [
            InspectedProgram(self._functions.contribution, each, each[1], shard.rows)
            for each, shard in zip(args, batch_plan.shards, strict=True)
        ]
        return parts, programs

    def check(self, batch: GlobalBatch, size: int, state: State) -> None:
        """Warn before the first step of replicas that draw the same random numbers for their rows."""
        self._functions.check_draws(lambda rows: self._list_draws(batch, rows, state), size)

    def _list_draws(self, batch: GlobalBatch, rows: int, state: State) -> list[Shape]:
        """Return the shapes of a replica's random numbers that are always the same. Those by which metrics break ties do no harm."""
        divisors = self._divisors.of(batch, rows, state)
        program, (contribution, outputs) = self._steps[None in divisors].trace(
            state, self._inputs.shapes(batch, rows), len(divisors), self._inputs.constants()
        )
        counted = map_tree(lambda _: True, (contribution, outputs))
        metrics = [False] * len(contribution.metrics)
        return list_constant_draws(program, jax.tree.leaves((counted[0]._replace(metrics=metrics), counted[1])))


def take_divisors(numbers: Array) -> Array:
    """Return the divisors that shapes decide, behind the row fraction and the rows of the batch."""
    return numbers[2:]
