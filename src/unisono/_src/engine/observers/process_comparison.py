"""The comparison of a step's inputs between processes. They are rows, arguments, assigned variables and the program."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from unisono._src.engine.exchange.protocol import Words
from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.observers.process_words import NOTHING_COMPARED, StartDigests, StepWords, StopWish, digest_values
from unisono._src.engine.step.observer import StartState, StepObserver
from unisono._src.engine.step.step_digests import StepDigests
from unisono._src.placement import Placement
from unisono._src.processes import names
from unisono._src.programs.program_digest import replace_keys
from unisono._src.typing import AnyArray


class ProcessComparison(StepObserver):
    """The observer that compares a step's inputs between processes. Digests of them go along with the all-reduces of the step."""

    def __init__(self, placement: Placement, trains: bool, fixed_digest: int = 0) -> None:
        """Prepare the comparison.

        The start of a program that does not train is not compared. `fixed_digest` is a digest of numbers in the program, which
        always are.
        """
        self.wants_assigned = trains
        self._fixed_digest = fixed_digest
        self._constant_digests = ConstantDigests(placement.lead)
        self._may_programs_differ = bool(os.environ.get(names.OTHER_PROGRAMS))
        self._digests = NOTHING_COMPARED

    def begin(self, constants: Sequence[AnyArray]) -> None:
        self._digests = StartDigests(constants=self._constant_digests.digest(constants) ^ self._fixed_digest)

    def take_state(self, state: StartState) -> None:
        assigned = [(0, state.digest())] if state.assigned is None else state.assigned
        self._digests = self._digests._replace(assigned=digest_values(assigned))

    def list_words(self, batch: GlobalBatch, digest_program: Callable[[], int]) -> list[Words]:
        if not self._may_programs_differ:
            self._digests = self._digests._replace(program=digest_program())
        return [StopWish(), StepWords(batch, self._digests)]

    def after_steps(self, batches: Sequence[GlobalBatch], digests: Sequence[StepDigests]) -> None:
        """Forget the digest of assigned variables.

        The next step may be of the same call here, and of another call in another process.
        """
        self._digests = self._digests._replace(assigned=NOTHING_COMPARED.assigned)


class ReadArray(NamedTuple):
    """A JAX array that was read, and its digest. The array cannot change."""

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
        """Digest the values for one call, in 31 bits.

        It is 0 if there are none. A call waits for an array on another device than a CPU. So such arrays are read at calls 1, 2,
        4, 8 and so on: at the same calls in all processes, whichever of their arrays are new.
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
