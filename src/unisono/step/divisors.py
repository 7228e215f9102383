"""What the losses are divided by, counted over the whole global batch before the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono.data.division import Divided
from unisono.exchange.base import Exchange
from unisono.placement import Placement
from unisono.replica.program import ReplicaFunctions
from unisono.step.copies import Copies, Numbers
from unisono.step.replicas import Sum, numbers_of
from unisono.xla.programs import Program

COUNTED = "counted"
"""Stands for a divisor that masks or weights decide, not shapes."""


class Divisors:
    """The divisor of each loss term of a batch, on every device."""

    def __init__(
        self, functions: ReplicaFunctions, placement: Placement, exchange: Exchange, numbers: Numbers, training: bool
    ) -> None:
        self._functions = functions
        self._placement = placement
        self._numbers = numbers
        self._training = training
        self._by_shape: dict[Any, list[Any]] = {}
        self._count = Program(self._counted)
        self._sum = Sum(placement, exchange)
        self._copies = Copies(placement.devices)

    def __call__(self, inputs: list[list[list[Any]]], parts: Divided) -> list[jax.Array]:
        """For each device, the divisors as one array; `inputs` has each device's weights and other state."""
        devices = self._placement.devices
        of_replicas = [self._of_shape(inputs[0], parts, replica) for replica in range(len(parts.rows))]
        if any(COUNTED in divisors for divisors in of_replicas):
            totals = self._sum(partial(self._run, inputs, parts))
            return [totals[index] if index in totals else self._copies.on(index, [totals[0]])[0] for index in range(len(devices))]
        sums = tuple(sum(column) for column in zip(*of_replicas, strict=True))
        return [self._numbers.on(device, np.float32, sums) for device in devices]

    def _of_shape(self, state: list[list[Any]], parts: Divided, replica: int) -> list[Any]:
        key = parts.keys[replica]
        if key not in self._by_shape:

            def look(*args: Any) -> None:
                found = self._functions.divisors(*args, training=self._training)
                self._by_shape[key] = [0.0 if d is None else d if isinstance(d, float) else COUNTED for d in found]

            numbers = numbers_of(self._numbers, self._placement.lead, parts, replica)
            jax.eval_shape(look, *state, parts.shards[replica], *numbers)
        return self._by_shape[key]

    def _counted(self, *args: Any) -> jax.Array:
        found = self._functions.divisors(*args, training=self._training)
        return jnp.stack([jnp.float32(0 if divisor is None else divisor) for divisor in found])

    def _run(self, inputs: list[Any], parts: Divided, device: int, replica: int) -> jax.Array | None:
        if replica >= len(parts.rows):
            return None
        where = self._placement.devices[device]
        numbers = numbers_of(self._numbers, where, parts, replica)
        return self._count(where, parts.keys[replica], *inputs[device], parts.shards[replica], *numbers)
