"""Totals over all replicas: of sums that the devices have finished, and of replicas that are run one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from unisono._src import reduction_tree
from unisono._src.data.global_batch import GlobalBatch
from unisono._src.exchange.protocol import DeviceSums, Exchange, SumDescription
from unisono._src.placement import Placement
from unisono._src.step.plan import BatchPlan
from unisono._src.step.process_words import NOTHING_COMPARED, AttemptWords, StartDigests, StepWords
from unisono._src.typed_jax import map_tree
from unisono._src.typing import PyTree
from unisono._src.xla.programs import DeviceProgram


def add_contributions(left: PyTree, right: PyTree) -> PyTree:
    """Return the sum of two trees of arrays. This is the only arithmetic between replicas."""
    return map_tree(jnp.add, left, right)


class DeviceTotal:
    """The total of one kind of contribution, by the exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._add = DeviceProgram(add_contributions)

    @property
    def homes(self) -> tuple[int, ...]:
        """Return the devices on which totals arrive."""
        return self._exchange.homes

    def __call__(
        self,
        nodes: Sequence[DeviceSums],
        batch_plan: BatchPlan,
        like: PyTree,
        batch: GlobalBatch,
        start: StartDigests = NOTHING_COMPARED,
        attempt: AttemptWords | None = None,
    ) -> dict[int, PyTree]:
        """Return the total for each home.

        Args:
            nodes: The sums of each device, by the spans of replicas that they add up.
            batch_plan: The plan of the batch.
            like: A contribution, in shapes.
            batch: The batch that the contributions come from.
            start: What the step starts from, which processes compare.
            attempt: Takes what processes tell of a contribution that several of them have computed.
        """
        description = SumDescription(batch_plan.of_processes, like, StepWords(batch, start, attempt))
        totals = self._exchange.total(nodes, self.add_on, batch_plan.leaves, description)
        return dict(zip(self._exchange.homes, totals, strict=True))

    def add_on(self, device: jax.Device, left: PyTree, right: PyTree) -> PyTree:
        """Return the sum of two contributions on a device."""
        leaves, structure = jax.tree.flatten(left)
        return self._add(device, (structure, tuple(leaf.shape for leaf in leaves)), left, right)


class ReplicaSum:
    """The total of one kind of contribution over all replicas."""

    def __init__(self, placement: Placement, exchange: Exchange) -> None:
        self._placement = placement
        self._total = DeviceTotal(exchange)

    def __call__(
        self, contributions: Mapping[int, PyTree], batch_plan: BatchPlan, like: PyTree, batch: GlobalBatch
    ) -> dict[int, PyTree]:
        """Return the total for each home.

        Args:
            contributions: Those of the replicas of this process that have rows, by the replicas' numbers.
            batch_plan: The plan of the batch.
            like: A contribution, in shapes.
            batch: The batch that the contributions come from.
        """
        leaves = {shard.leaf: contributions[shard.replica] for shard in batch_plan.shards}
        nodes: list[dict[range, PyTree | None]] = [{} for _ in self._placement.devices]
        for part in batch_plan.parts:
            add_here = partial(self._total.add_on, self._placement.devices[part.device])
            nodes[part.device][part.span] = reduction_tree.sum_tree(
                part.span, is_single_leaf, lambda span: leaves.get(span.start), add_here
            )
        return self._total(nodes, batch_plan, like, batch)


def is_single_leaf(span: range) -> bool:
    return len(span) == 1
