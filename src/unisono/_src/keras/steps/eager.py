"""Steps that are not compiled, of loops and of models."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.exchange.on_lead import LeadExchange
from unisono._src.engine.exchange.protocol import SumDescription, Words
from unisono._src.engine.global_batch import GlobalBatch, send_rows
from unisono._src.engine.packing import PackedTree, pack_tree, unpack_tree
from unisono._src.engine.state import State
from unisono._src.engine.step.observer import StepObserver, join_words
from unisono._src.engine.step.plan import BatchPlan, ReplicaRun, Shard, plan_batch
from unisono._src.engine.step.program import keep_dtypes
from unisono._src.engine.step.run_outputs import CarriedValue, DescribeOutputs, ReplicaOutputs, RunOutput
from unisono._src.engine.xla.programs import DeviceProgram
from unisono._src.keras.replica.random_keys import start_replica
from unisono._src.keras.replica.user_function import CodeRun, UserStep, divide_by_own
from unisono._src.keras.steps.model_step import ModelStep
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.typed_jax import device_put, eval_shape, map_tree
from unisono._src.typing import AnyArray, Array, Logs, PyTree


class ReplicaSum:
    """The total of replicas that run one by one. It is computed on the lead, for one kind of contribution."""

    def __init__(self, exchange: LeadExchange) -> None:
        self._exchange = exchange
        self._pack = DeviceProgram(pack_tree)

    def __call__(self, contributions: Mapping[int, PyTree], batch_plan: BatchPlan, like: PyTree, words: Words) -> PyTree:
        """Compute the total.

        Args:
            contributions: Those of the replicas of this process that have rows, by the replicas' numbers.
            batch_plan: The plan of the batch.
            like: A contribution, in shapes.
            words: The integers that processes exchange with it.
        """
        sums: dict[range, PackedTree | None] = {range(n, n + 1): None for part in batch_plan.parts for n in part.span}
        for shard in batch_plan.shards:
            sums[range(shard.leaf, shard.leaf + 1)] = self._pack_contribution(contributions[shard.replica])
        description = SumDescription(batch_plan.leaves, batch_plan.of_processes, eval_shape(pack_tree, like), words)
        total = self._exchange.total_on_lead(sums, description)
        return unpack_tree(total, like)

    def _pack_contribution(self, contribution: PyTree) -> PackedTree:
        leaves, structure = jax.tree.flatten(contribution)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        return self._pack(self._exchange.placement.lead, key, contribution)


class StepInput(NamedTuple):
    """The input of a step beside the state."""

    batch: GlobalBatch
    batch_plan: BatchPlan
    carried: Sequence[CarriedValue]
    constants: list[Array]

    def rows_of_replicas(self, lead: jax.Device) -> dict[int, PyTree]:
        """Send each replica's input to the lead. It is rows, or (rows, values) if values of an earlier step are carried over."""
        mesh = get_mesh((lead,))
        rows = {
            shard.replica: send_rows([self.batch], (shard.rows,), (len(shard.rows),), mesh) for shard in self.batch_plan.shards
        }
        if not self.carried:
            return rows
        values: list[dict[int, Array]] = device_put([dict(value.own) for value in self.carried], lead)
        for value, given in zip(self.carried, values, strict=True):
            if given.keys() != rows.keys():
                raise value.make_rows_error()
        return {replica: (batch, [given[replica] for given in values]) for replica, batch in rows.items()}


class EagerStep:
    """A step whose function is called with arrays. It has the interface of `Step`."""

    def __init__(
        self, function: UserStep, placement: Placement, exchange: LeadExchange, observers: Sequence[StepObserver] = ()
    ) -> None:
        """Prepare the steps. `placement` and `exchange` have one device in each process."""
        self._observers = observers
        self._function = function
        self._placement = placement
        self._plans = functools.cache(functools.partial(plan_batch, placement=placement))
        self._sum = ReplicaSum(exchange)
        self._outputs: dict[int, Sequence[jax.ShapeDtypeStruct]] = {}
        """The outputs of replicas of the last step, in shapes, by their rows."""
        self.state: State = ()
        """The newest state; empty before the first step."""

    def outputs(
        self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = (), carried: Sequence[CarriedValue] = ()
    ) -> tuple[Logs, list[RunOutput]]:
        """Run steps and give the last one's logs and replica outputs. The new state is then `self.state`."""
        lead = self._placement.lead
        logs: Logs = {}
        outputs: list[RunOutput] = []
        self.state = tuple(device_put([list(group) for group in state], lead))
        with jax.default_device(lead):
            for batch in batches:
                plan = self._plans(batch.rows, batch.sizes)
                logs, outputs = self._step(StepInput(batch, plan, carried, device_put(list(constants), lead)))
                for observer in self._observers:
                    observer.after_steps([batch], [])
        return logs, outputs

    def describe_outputs(self, batch: GlobalBatch) -> DescribeOutputs:
        """Find how to describe a replica's outputs of the last step.

        The result is a function of the number of rows. The last step was of this batch.
        """
        return functools.partial(describe_outputs, dict(self._outputs))

    def forget(self) -> None:
        """Drop the state."""
        self.state = ()

    def _step(self, step_input: StepInput) -> tuple[Logs, list[RunOutput]]:
        rows = step_input.rows_of_replicas(self._placement.lead)
        whole = self._run_whole(step_input)
        self._outputs = {step_input.batch.rows: eval_shape(list, whole.outputs)}
        summed: dict[int, list[Array]] = {}
        outputs: dict[int, ReplicaOutputs] = {}
        for shard in step_input.batch_plan.shards:
            run = self._run_replica(shard, rows[shard.replica], step_input, whole)
            summed[shard.replica], outputs[shard.replica] = self._function.list_summed(self.state, run), run.outputs
            self._outputs[len(shard.rows)] = eval_shape(list, run.outputs)
        like = eval_shape(lambda: self._function.list_summed(self.state, whole))
        totals = self._sum(summed, step_input.batch_plan, like, join_words(self._observers, step_input.batch))
        new, logs = self._function.finish(self.state, whole, totals)
        self.state = keep_dtypes(new, self.state)
        get_activity().report_next_step()
        return logs, stack_outputs(step_input.batch_plan, outputs, self._placement)

    def _run_whole(self, step_input: StepInput) -> CodeRun:
        """Run the code on all rows."""
        lead, rows = self._placement.lead, step_input.batch.rows
        batch: PyTree = send_rows([step_input.batch], (range(rows),), (rows,), get_mesh((lead,)))
        if step_input.carried:
            batch = batch, [join_replicas(value, step_input.batch_plan, lead) for value in step_input.carried]
        return self._function.run(self.state, batch, step_input.constants, jnp.int32(0), jnp.float32(1), divide_by_own)

    def _run_replica(self, shard: Shard, rows: PyTree, step_input: StepInput, whole: CodeRun) -> CodeRun:
        def find_divisor(place: int, divisor: float | Array) -> Array:
            return jnp.float32(whole.code.divisors[place])

        state = start_replica(self.state, self._function.variables.non_trainable, shard.replica)
        row_fraction = jnp.float32(len(shard.rows) / step_input.batch.rows)
        return self._function.run(state, rows, step_input.constants, jnp.int32(shard.replica), row_fraction, find_divisor)


def join_replicas(value: CarriedValue, batch_plan: BatchPlan, lead: jax.Device) -> Array:
    """Join the carried values of all replicas. Rows are concatenated. Of other values the first replica's is taken."""
    parts: list[Array] = device_put([part for _, part in sorted(value.present.items())], lead)
    sizes = [size for size in batch_plan.sizes if size]
    are_of_rows = all(part.shape[:1] == (size,) for part, size in zip(parts, sizes, strict=True))
    return jnp.concatenate(parts) if are_of_rows else parts[0]


def describe_outputs(known: dict[int, Sequence[jax.ShapeDtypeStruct]], rows: int) -> Sequence[jax.ShapeDtypeStruct]:
    """Describe in shapes a replica's outputs, for this number of rows.

    For an unknown number, the first axis of known outputs is replaced.
    """
    if rows in known:
        return known[rows]
    size, shapes = next(iter(known.items()))
    return [jax.ShapeDtypeStruct((rows, *s.shape[1:]) if s.shape[:1] == (size,) else s.shape, s.dtype) for s in shapes]


def stack_outputs(batch_plan: BatchPlan, outputs: dict[int, ReplicaOutputs], placement: Placement) -> list[RunOutput]:
    """Stack the outputs of neighbouring replicas, as compiled steps leave them. The arrays have room for all replicas."""

    def stack_run(run: ReplicaRun) -> ReplicaOutputs:
        run_outputs = [outputs[replica] for replica in range(run.first, run.first + run.count)]
        return map_tree(
            lambda *arrays: jnp.stack([*arrays, *[jnp.zeros_like(arrays[0])] * (placement.replicas - run.count)]), *run_outputs
        )

    lead = get_mesh((placement.lead,))
    return [RunOutput(lead, (run,), stack_run(run)) for part in batch_plan.parts for run in part.runs]


class EagerWholeStep:
    """A step whose function is called with arrays. It has the interface of `Step`."""

    has_own_logs = True

    def __init__(
        self, function: ModelStep, placement: Placement, exchange: LeadExchange, observers: Sequence[StepObserver] = ()
    ) -> None:
        """Prepare the steps. `placement` and `exchange` have one device in each process."""
        self._function = function
        self._placement = placement
        self._observers = observers
        self._plans = functools.cache(functools.partial(plan_batch, placement=placement))
        self._words = ReplicaSum(exchange) if placement.processes else None
        """Sums of nothing. The integers that processes compare go along with them."""
        self.state: State = ()
        """The newest state; empty before the first step."""

    def __call__(self, state: State, batches: list[GlobalBatch]) -> tuple[Logs, State]:
        """Run steps and give the last one's logs and the state."""
        return self.outputs(state, batches)[0], self.state

    def outputs(
        self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = ()
    ) -> tuple[Logs, list[RunOutput]]:
        """Run steps and give the last one's logs. There are no outputs of single replicas. The new state is then `self.state`."""
        lead = self._placement.lead
        logs: Logs = {}
        self.state = tuple(device_put([list(group) for group in state], lead))
        with jax.default_device(lead):
            for batch in batches:
                self._compare_rows(batch)
                rows = send_rows([batch], (range(batch.rows),), (batch.rows,), get_mesh((lead,)))
                new, logs = self._function(self.state, rows)
                self.state = keep_dtypes(new, self.state)
                get_activity().report_next_step()
                for observer in self._observers:
                    observer.after_steps([batch], [])
        return logs, []

    def _compare_rows(self, batch: GlobalBatch) -> None:
        """Refuse rows that differ between processes."""
        if self._words is None:
            return
        plan, nothing = self._plans(batch.rows, batch.sizes), jnp.zeros(1)
        words = join_words(self._observers, batch)
        self._words(dict.fromkeys((shard.replica for shard in plan.shards), nothing), plan, eval_shape(lambda: nothing), words)

    def forget(self) -> None:
        """Drop the state."""
        self.state = ()
