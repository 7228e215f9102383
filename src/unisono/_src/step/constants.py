"""What every device holds: state, sent from the lead when it has changed, and numbers, sent once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

MOST_NUMBERS = 4096


class Copies:
    """Copies of a list of arrays on the devices of a placement.

    Keras' loops hold the lead's arrays and hand them back, or hand back others where a callback has assigned something.
    """

    def __init__(self, devices: tuple[jax.Device, ...]) -> None:
        self._devices = devices
        self._source: list[Any] = []
        self._held: dict[int, list[Any]] = {}

    def on(self, index: int, source: list[Any]) -> list[Any]:
        """The arrays of `source` on the device of this index."""
        if len(source) != len(self._source) or any(a is not b for a, b in zip(source, self._source, strict=True)):
            self._source, self._held = list(source), {}
        if index not in self._held:
            self._held[index] = jax.device_put(self._source, self._devices[index])
        return self._held[index]

    def forget(self) -> None:
        """Lets go of all of them."""
        self._source, self._held = [], {}

    def computed(self, held: dict[int, list[Any]]) -> list[Any]:
        """Keeps new arrays that some devices have computed for themselves, the lead (0) among them; the lead's."""
        self._source, self._held = list(held[0]), dict(held)
        return held[0]


class Numbers:
    """Small constants of steps, kept on the devices: one transfer for each value, not one a step."""

    def __init__(self) -> None:
        self._kept: dict[Any, jax.Array] = {}

    def on(self, device: jax.Device, dtype: type[np.generic], value: float | tuple[float, ...]) -> jax.Array:
        key = device, dtype, value
        if key not in self._kept:
            if len(self._kept) >= MOST_NUMBERS:  # batches of ever new sizes
                self._kept.clear()
            self._kept[key] = jax.device_put(np.array(value, dtype), device)
        return self._kept[key]
