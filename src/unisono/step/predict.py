"""The step behind predict: the outputs of every row, in order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono.data.division import divided
from unisono.placement import Placement
from unisono.replica.program import ReplicaFunctions
from unisono.step.copies import Copies, Numbers
from unisono.xla.programs import Program


class PredictStep:
    """(weights, other state) and a global batch in; outputs, on the lead device, and the same state out."""

    def __init__(self, model: Any, placement: Placement) -> None:
        self._placement = placement
        self._numbers = Numbers()
        self._replica = Program(ReplicaFunctions(model).predict)
        self._groups = Copies(placement.devices), Copies(placement.devices)
        self._join = Program(joined)

    def __call__(self, state: tuple[list[Any], ...], batch: Any) -> tuple[Any, tuple[list[Any], ...]]:
        parts, outputs = divided(batch, self._placement), []
        for replica, shard in enumerate(parts.shards):
            index = self._placement.device_of[replica]
            device = self._placement.devices[index]
            weights, others = (copies.on(index, group) for copies, group in zip(self._groups, state, strict=True))
            number = self._numbers.on(device, np.int32, replica)
            outputs.append(self._replica(device, parts.keys[replica], weights, others, shard, number))
            if self._placement.replicas > 1:
                check_rows(outputs[-1], parts.rows[replica])
        outputs = jax.device_put(outputs, self._placement.lead)
        return self._join(self._placement.lead, tuple(parts.keys), outputs), state


def joined(outputs: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs) if len(outputs) > 1 else outputs[0]


def check_rows(outputs: Any, rows: int) -> None:
    """The outputs of replicas are put together by their first axis, so it must count rows."""
    for leaf in jax.tree.leaves(outputs):
        if not leaf.ndim or leaf.shape[0] % rows:
            raise ValueError(
                f"predict received an output of shape {leaf.shape} for {rows} rows: outputs of several replicas are put together "
                f"by their first axis, which must count rows. Return one entry for each row, or write replicas=1."
            )
