"""Totals over all replicas: what an exchange is told of them, and those of replicas that are run one by one."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from unisono._src.data.global_batch import GlobalBatch
from unisono._src.exchange.on_lead import LeadExchange
from unisono._src.exchange.protocol import SumDescription
from unisono._src.packing import PackedTree, pack_tree, unpack_tree
from unisono._src.step.plan import BatchPlan
from unisono._src.step.process_words import NOTHING_COMPARED, AttemptWords, StartDigests, StepWords
from unisono._src.typed_jax import eval_shape
from unisono._src.typing import PyTree
from unisono._src.xla.programs import DeviceProgram


def describe_sum(
    batch_plan: BatchPlan,
    like: dict[str, jax.ShapeDtypeStruct],
    batch: GlobalBatch,
    start: StartDigests = NOTHING_COMPARED,
    attempt: AttemptWords | None = None,
) -> SumDescription:
    """Return the sum over all replicas of a batch.

    Args:
        batch_plan: The plan of the batch.
        like: A contribution, in shapes.
        batch: The batch that the contributions come from.
        start: What the step starts from, which processes compare.
        attempt: Takes what processes tell of a contribution that several of them have computed.
    """
    return SumDescription(batch_plan.leaves, batch_plan.of_processes, like, StepWords(batch, start, attempt))


class ReplicaSum:
    """The total of one kind of contribution over replicas that have run one by one, on the lead."""

    def __init__(self, exchange: LeadExchange) -> None:
        self._exchange = exchange
        self._pack = DeviceProgram(pack_tree)

    def __call__(self, contributions: Mapping[int, PyTree], batch_plan: BatchPlan, like: PyTree, batch: GlobalBatch) -> PyTree:
        """Return the total.

        Args:
            contributions: Those of the replicas of this process that have rows, by the replicas' numbers.
            batch_plan: The plan of the batch.
            like: A contribution, in shapes.
            batch: The batch that the contributions come from.
        """
        sums: dict[range, PackedTree | None] = {range(n, n + 1): None for part in batch_plan.parts for n in part.span}
        for shard in batch_plan.shards:
            sums[range(shard.leaf, shard.leaf + 1)] = self._pack_contribution(contributions[shard.replica])
        total = self._exchange.total_on_lead(sums, describe_sum(batch_plan, eval_shape(pack_tree, like), batch))
        return unpack_tree(total, like)

    def _pack_contribution(self, contribution: PyTree) -> PackedTree:
        leaves, structure = jax.tree.flatten(contribution)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        return self._pack(self._exchange.placement.lead, key, contribution)
