"""Digests of the values that are the same for all replicas, which processes compare."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from unisono._src.observers.process_words import digest_values
from unisono._src.program_digest import replace_keys
from unisono._src.typing import AnyArray


class ReadArray(NamedTuple):
    """An array of JAX that was read, and its digest: it cannot change."""

    array: weakref.ref[jax.Array]
    digest: int


class ConstantDigests:
    """Digests of the constants of one program. An array of JAX that comes again is not read again."""

    def __init__(self, lead: jax.Device) -> None:
        """Constants lie on the lead device, or on the host."""
        self._reads_at_each_call = lead.platform == "cpu"
        self._calls = 0
        self._read: dict[int, ReadArray] = {}

    def digest(self, constants: Sequence[AnyArray]) -> int:
        """Return a digest of 31 bits of the values for one call; 0 where there are none.

        A call waits for an array on another device than a CPU. So such arrays are read at calls 1, 2, 4, 8 and so on: at the same calls in
        all processes, whichever of their arrays are new.
        """
        self._calls += 1
        reads_arrays = self._reads_at_each_call or self._calls & (self._calls - 1) == 0
        digests = [
            self._digest_value(number, value)
            for number, value in enumerate(constants)
            if not isinstance(value, jax.Array) or (reads_arrays and value.is_fully_addressable)
        ]
        return digest_values(enumerate([np.array(digests)])) if digests else 0

    def _digest_value(self, number: int, value: AnyArray) -> int:
        if not isinstance(value, jax.Array):
            return digest_values([(number, value)])
        known = self._read.get(number)
        if known is None or known.array() is not value:
            known = self._read[number] = ReadArray(weakref.ref(value), digest_values([(number, replace_keys(value))]))
        return known.digest
