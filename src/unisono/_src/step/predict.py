"""The step of predict: the outputs of every row, in order, and the state that the forward pass leaves."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.data.global_batch import GlobalBatch, as_global_batch, send_rows
from unisono._src.exchange.gather_rows import get_row_gatherer
from unisono._src.exchange.protocol import Exchange
from unisono._src.placement import Placement, split_evenly
from unisono._src.replica.compiled_model import ModelComputation
from unisono._src.replica.contribution import AssignedState
from unisono._src.replica.protocol import State
from unisono._src.replica.state_merging import merge_assigned
from unisono._src.step.device_copies import DeviceCopies, DeviceNumbers
from unisono._src.step.eager import EagerProgram
from unisono._src.step.plan import BatchPlan, Shard, plan_batch
from unisono._src.step.replica_sums import ReplicaSum
from unisono._src.typing import Array, Outputs, UserBatch
from unisono._src.xla.programs import DeviceProgram
from unisono._src.xla.rewrite import rewrite_function


class PredictStep:
    """The step of predict: takes (weights, other state) and global batches; returns outputs, on the lead device, and the new state."""

    has_more_logs = True

    def __init__(self, functions: ModelComputation, placement: Placement, exchange: Exchange) -> None:
        self._placement = placement
        self._numbers = DeviceNumbers()
        self._functions = functions
        predict = functions.predict
        self._program = (
            EagerProgram(predict) if functions.eager else DeviceProgram(rewrite_function(predict, placement.lead.platform))
        )
        self._weights = DeviceCopies(placement.devices)
        self._others = DeviceCopies(placement.devices)
        self._join = DeviceProgram(join_outputs)
        self._sum = ReplicaSum(placement, exchange)
        self._merge = DeviceProgram(self._merge_assigned)
        self._rows_of_all = get_row_gatherer(placement) if placement.processes else None
        self._plans = functools.cache(functools.partial(plan_batch, placement=placement))
        self._like: dict[Hashable, tuple[Outputs, AssignedState]] = {}
        self._state: State = ()

    def __call__(self, state: State, batches: Sequence[UserBatch]) -> tuple[Outputs, State]:
        """Return the outputs of all the batches' rows, and the new state."""
        outputs = []
        for batch in batches:
            batch_outputs, state = self._predict_batch(state, as_global_batch(batch))
            outputs.append(batch_outputs)
        return join_outputs(outputs), state

    @property
    def state(self) -> State:
        """Return the newest state, on the lead device."""
        return self._state

    def _predict_batch(self, state: State, batch: GlobalBatch) -> tuple[Outputs, State]:
        batch_plan = self._plans(batch.rows, None)
        results = {shard.replica: self._run_shard(state, batch, shard) for shard in batch_plan.shards}
        like = self._make_shapes(state, batch) if self._rows_of_all else (None, None)
        lead = self._placement.lead
        outputs = jax.device_put([outputs for outputs, _ in results.values()], lead)
        own = self._join(lead, (batch.rows, batch.signature), outputs) if outputs else make_empty_outputs(like[0])
        assigned = {replica: of_replica for replica, (_, of_replica) in results.items()}
        others = self._update_state(state[1], batch, assigned, batch_plan, like[1])
        self._state = state[0], others
        return self._gather_outputs(own, batch.rows, like[0]), self._state

    def _make_shapes(self, state: State, batch: GlobalBatch) -> tuple[Outputs, AssignedState]:
        """Return (outputs, what is assigned) of one row, in shapes."""
        if batch.signature not in self._like:
            self._like[batch.signature] = jax.eval_shape(self._functions.predict, *state, batch.shapes(1), np.int32(0))
        return self._like[batch.signature]

    def _gather_outputs(self, outputs: Outputs, rows: int, like: Outputs) -> Outputs:
        """Return the outputs of all processes; `like` are those of one row, in shapes."""
        if self._rows_of_all is None:
            return outputs
        leaves, structure = jax.tree.flatten(outputs)
        shards = split_evenly(rows, self._placement.replicas)
        process_rows = [sum(map(len, shards[block.start : block.stop])) for block in self._placement.of_processes]
        counts = [[row_output.shape[0] * count for count in process_rows] for row_output in jax.tree.leaves(like)]
        return jax.tree.unflatten(structure, self._rows_of_all(leaves, counts))

    def _run_shard(self, state: State, batch: GlobalBatch, shard: Shard) -> tuple[Outputs, AssignedState]:
        index = shard.device
        rows = shard.rows
        device = self._placement.devices[index]
        number = self._numbers.on(device, np.int32, shard.replica)
        shard_batch = send_rows([batch], rows, (len(rows),), device)
        inputs = self._weights.on(index, state[0]), self._others.on(index, state[1]), shard_batch
        outputs, assigned = self._program(device, (len(rows), batch.signature), *inputs, number)
        if self._placement.replicas > 1:
            check_output_rows(outputs, len(rows))
        return outputs, assigned

    def _update_state(
        self,
        others: list[Array],
        batch: GlobalBatch,
        assigned: dict[int, AssignedState],
        batch_plan: BatchPlan,
        like: AssignedState | None,
    ) -> list[Array]:
        """Return the state with what the replicas assigned. Most models assign nothing when they predict."""
        if not self._functions.assigned:
            return others
        totals = self._sum(assigned, batch_plan, like, batch)
        results = {}
        for home, total in totals.items():
            device = self._placement.devices[home]
            rows = self._numbers.on(device, np.float32, batch.rows)
            present = self._numbers.on(device, np.int32, batch_plan.present)
            results[home] = self._merge(device, None, self._others.on(home, others), total, rows, present)
        self._functions.check(results[0][1])
        return self._others.take_computed({home: after for home, (after, _) in results.items()})

    def _merge_assigned(
        self, before: list[Array], total: AssignedState, rows: Array, present: Array
    ) -> tuple[list[Array], list[Array]]:
        functions = self._functions
        return merge_assigned(
            functions.model.non_trainable_variables, functions.assigned, functions.has_one_replica, before, total, rows, present
        )

    def forget(self) -> None:
        """Drop the copies on the devices; the next step sends them again."""
        self._weights.forget()
        self._others.forget()


def join_outputs(outputs: list[Outputs]) -> Outputs:
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs) if len(outputs) > 1 else outputs[0]


def make_empty_outputs(like: Outputs) -> Outputs:
    """Return the outputs of no rows."""
    return jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape[1:]), leaf.dtype), like)


def check_output_rows(outputs: Outputs, rows: int) -> None:
    """Refuse outputs whose first axis does not count rows: the outputs of replicas are concatenated along it."""
    for leaf in jax.tree.leaves(outputs):
        if not leaf.ndim or leaf.shape[0] % rows:
            raise ValueError(
                f"predict received an output of shape {leaf.shape} for {rows} rows: outputs of several replicas are put together "
                f"by their first axis, which must count rows. Return one entry for each row, or write replicas=1."
            )
