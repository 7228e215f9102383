"""State that every device holds, sent from the lead when it has changed."""

from __future__ import annotations

from typing import Any

import jax


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

    def computed(self, held: dict[int, list[Any]]) -> list[Any]:
        """Keeps new arrays that some devices have computed for themselves, the lead (0) among them; the lead's."""
        self._source, self._held = list(held[0]), dict(held)
        return held[0]
