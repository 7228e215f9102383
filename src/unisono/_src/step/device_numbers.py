"""Numbers of steps, as arrays on the devices."""

from __future__ import annotations

import jax
import numpy as np

from unisono._src.typed_jax import device_put
from unisono._src.typing import Array

MOST_NUMBERS = 4096


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
            self._cache[key] = device_put(np.array(value, dtype), device)
        return self._cache[key]
