"""Copies of arrays on the devices: state, sent from the lead when it has changed, and numbers, sent once."""

from __future__ import annotations

import jax
import numpy as np

from unisono._src.typing import Array

MOST_NUMBERS = 4096


class DeviceCopies:
    """Copies of a list of arrays on the devices of a placement.

    Keras' loops keep the lead's arrays and pass them back, or pass other arrays where a callback has assigned a variable.
    """

    def __init__(self, devices: tuple[jax.Device, ...]) -> None:
        self._devices = devices
        self._source: list[Array] = []
        self._copies: dict[int, list[Array]] = {}

    def on(self, index: int, source: list[Array]) -> list[Array]:
        """Return the arrays of `source` on the device of this index; send them if they are not there."""
        if len(source) != len(self._source) or any(a is not b for a, b in zip(source, self._source, strict=True)):
            self._source = list(source)
            self._copies = {}
        if index not in self._copies:
            self._copies[index] = jax.device_put(self._source, self._devices[index])
        return self._copies[index]

    def forget(self) -> None:
        """Drop all copies."""
        self._source = []
        self._copies = {}

    def take_computed(self, copies: dict[int, list[Array]]) -> list[Array]:
        """Take over new arrays that some devices have computed, the lead (0) among them; return the lead's arrays."""
        self._source = list(copies[0])
        self._copies = dict(copies)
        return copies[0]


class DeviceNumbers:
    """Small constants of steps, cached on the devices: one transfer for each value, not one a step."""

    def __init__(self) -> None:
        self._cache: dict[tuple[jax.Device, type[np.generic], float | tuple[float, ...]], Array] = {}

    def on(self, device: jax.Device, dtype: type[np.generic], value: float | tuple[float, ...]) -> Array:
        """Return a number, or a vector of numbers, on a device."""
        key = device, dtype, value
        if key not in self._cache:
            if len(self._cache) >= MOST_NUMBERS:  # every batch has another size
                self._cache.clear()
            self._cache[key] = jax.device_put(np.array(value, dtype), device)
        return self._cache[key]
