"""The step behind predict: the outputs of every row, in order, and the state that the forward pass leaves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.data.global_batch import GlobalBatch, global_batch, sent
from unisono._src.exchange.gather_rows import rows_of_all
from unisono._src.exchange.protocol import Exchange
from unisono._src.placement import Placement, split_evenly
from unisono._src.replica.compiled_model import ReplicaFunctions
from unisono._src.replica.contribution import Assigned
from unisono._src.replica.state_merging import merged
from unisono._src.step.constants import Copies, Numbers
from unisono._src.step.eager import EagerProgram
from unisono._src.step.plan import Plan, Shard, plan
from unisono._src.step.replica_sums import Sum
from unisono._src.xla.programs import Program
from unisono._src.xla.rewrite import rewritten

State = tuple[list[Any], ...]


class PredictStep:
    """(weights, other state) and a global batch in; outputs, on the lead device, and the state after it out."""

    says_more = True

    def __init__(self, functions: ReplicaFunctions, placement: Placement, exchange: Exchange) -> None:
        self._placement = placement
        self._numbers = Numbers()
        self._functions = functions
        by = functions.predict
        self._replica = EagerProgram(by) if functions.eager else Program(rewritten(by, placement.lead.platform))
        self._weights, self._others = Copies(placement.devices), Copies(placement.devices)
        self._join = Program(joined)
        self._sum = Sum(placement, exchange)
        self._merge = Program(self._merged)
        self._rows_of_all = rows_of_all(placement) if placement.processes else None
        self._plans = functools.cache(functools.partial(plan, placement=placement))
        self._like: dict[Any, Any] = {}
        self._state: State = ()

    def __call__(self, state: State, batches: Sequence[Any]) -> tuple[Any, State]:
        """The outputs of all the batches' rows, and the state."""
        outputs = []
        for batch in batches:
            out, state = self._one(state, global_batch(batch))
            outputs.append(out)
        return joined(outputs), state

    @property
    def state(self) -> State:
        """The newest state, on the lead device."""
        return self._state

    def _one(self, state: State, batch: GlobalBatch) -> tuple[Any, State]:
        now = self._plans(batch.rows, None)
        results = {shard.replica: self._run(state, batch, shard) for shard in now.shards}
        like = self._shapes(state, batch) if self._rows_of_all else (None, None)
        lead = self._placement.lead
        outputs = jax.device_put([outputs for outputs, _ in results.values()], lead)
        own = self._join(lead, (batch.rows, batch.signature), outputs) if outputs else no_rows(like[0])
        others = self._state_after(state[1], batch, {r: assigned for r, (_, assigned) in results.items()}, now, like[1])
        self._state = state[0], others
        return self._of_all(own, batch.rows, like[0]), self._state

    def _shapes(self, state: State, batch: GlobalBatch) -> tuple[Any, Any]:
        """(outputs, what is assigned) of one row."""
        if batch.signature not in self._like:
            self._like[batch.signature] = jax.eval_shape(self._functions.predict, *state, batch.shapes(1), np.int32(0))
        return self._like[batch.signature]

    def _of_all(self, outputs: Any, rows: int, like: Any) -> Any:
        """The outputs of all processes."""
        if self._rows_of_all is None:
            return outputs
        leaves, structure = jax.tree.flatten(outputs)
        shards = split_evenly(rows, self._placement.replicas)
        of_processes = [sum(map(len, shards[block.start : block.stop])) for block in self._placement.of_processes]
        counts = [[of_row.shape[0] * count for count in of_processes] for of_row in jax.tree.leaves(like)]
        return jax.tree.unflatten(structure, self._rows_of_all(leaves, counts))

    def _run(self, state: State, batch: GlobalBatch, shard: Shard) -> tuple[Any, Assigned]:
        index, rows = shard.device, shard.rows
        device = self._placement.devices[index]
        number = self._numbers.on(device, np.int32, shard.replica)
        mine = sent([batch], rows, (len(rows),), device)
        inputs = self._weights.on(index, state[0]), self._others.on(index, state[1]), mine
        outputs, assigned = self._replica(device, (len(rows), batch.signature), *inputs, number)
        if self._placement.replicas > 1:
            check_rows(outputs, len(rows))
        return outputs, assigned

    def _state_after(
        self, others: list[Any], batch: GlobalBatch, assigned: dict[int, Assigned], now: Plan, like: Any
    ) -> list[Any]:
        """Most models assign nothing when they predict."""
        if not self._functions.assigned:
            return others
        totals = self._sum(assigned, now, like, batch)
        results = {}
        for home, total in totals.items():
            device = self._placement.devices[home]
            rows = self._numbers.on(device, np.float32, batch.rows)
            there = self._numbers.on(device, np.int32, now.present)
            results[home] = self._merge(device, None, self._others.on(home, others), total, rows, there)
        self._functions.check(results[0][1])
        return self._others.computed({home: after for home, (after, _) in results.items()})

    def _merged(self, before: list[Any], total: Assigned, rows: Any, present: Any) -> tuple[list[Any], list[Any]]:
        of = self._functions
        return merged(of.model.non_trainable_variables, of.assigned, of.alone, before, total, rows, present)

    def forget(self) -> None:
        """Lets go of the copies on the devices; the next step sends them again."""
        self._weights.forget()
        self._others.forget()


def joined(outputs: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs) if len(outputs) > 1 else outputs[0]


def no_rows(like: Any) -> Any:
    return jax.tree.map(lambda of_row: jnp.zeros((0, *of_row.shape[1:]), of_row.dtype), like)


def check_rows(outputs: Any, rows: int) -> None:
    """The outputs of replicas are put together by their first axis, so it must count rows."""
    for leaf in jax.tree.leaves(outputs):
        if not leaf.ndim or leaf.shape[0] % rows:
            raise ValueError(
                f"predict received an output of shape {leaf.shape} for {rows} rows: outputs of several replicas are put together "
                f"by their first axis, which must count rows. Return one entry for each row, or write replicas=1."
            )
