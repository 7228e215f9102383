"""Totals over replicas that are run one by one."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from unisono._src.engine.exchange.on_lead import LeadExchange
from unisono._src.engine.exchange.protocol import SumDescription, Words
from unisono._src.engine.packing import PackedTree, pack_tree, unpack_tree
from unisono._src.engine.step.plan import BatchPlan
from unisono._src.engine.xla.programs import DeviceProgram
from unisono._src.typed_jax import eval_shape
from unisono._src.typing import PyTree


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
