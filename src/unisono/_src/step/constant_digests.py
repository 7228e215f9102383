"""Digests of the values that are the same for all replicas, which processes compare."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from unisono._src.program_digest import replace_keys
from unisono._src.step.process_words import digest_values
from unisono._src.typing import AnyArray


class ReadArray(NamedTuple):
    """An array of JAX that was read, and its digest: it cannot change."""

    array: weakref.ref[jax.Array]
    digest: int


class ConstantDigests:
    """Digests of the constants of one program. An array of JAX that comes again is not read again."""

    def __init__(self, lead: jax.Device) -> None:
        """Constants lie on the lead device, or on the host."""
        self._reads_arrays = lead.platform == "cpu"
        self._read: dict[int, ReadArray] = {}

    def digest(self, constants: Sequence[AnyArray]) -> int:
        """Return a digest of 31 bits of the values on the host; 0 where there are none.

        Arrays on other devices than CPUs are left out: each step would wait for them.
        """
        digests = [self._digest_value(number, value) for number, value in enumerate(constants) if self._is_read(value)]
        return digest_values(enumerate([np.array(digests)])) if digests else 0

    def _is_read(self, value: AnyArray) -> bool:
        return not isinstance(value, jax.Array) or (self._reads_arrays and value.is_fully_addressable)

    def _digest_value(self, number: int, value: AnyArray) -> int:
        if not isinstance(value, jax.Array):
            return digest_values([(number, value)])
        known = self._read.get(number)
        if known is None or known.array() is not value:
            known = self._read[number] = ReadArray(weakref.ref(value), digest_values([(number, replace_keys(value))]))
        return known.digest
