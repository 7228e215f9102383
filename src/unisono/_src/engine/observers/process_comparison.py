"""The comparison of a step's inputs between processes. They are rows, arguments, assigned variables and the program."""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from unisono._src.engine.exchange.protocol import Words
from unisono._src.engine.global_batch import NO_POSITION, GlobalBatch, Position
from unisono._src.engine.step.observer import StartState, StepObserver
from unisono._src.engine.step.step_digests import StepDigests
from unisono._src.placement import Placement
from unisono._src.processes import names
from unisono._src.processes.agreement import get_agreement
from unisono._src.programs.program_digest import replace_keys
from unisono._src.typing import AnyArray


class StartDigests(NamedTuple):
    """Digests of a step's inputs beside the rows, 31 bits each."""

    assigned: int = 0
    """Of the variables that were assigned, and come from no step. 0 if there are none."""
    constants: int = 0
    """Of the values on the host that are the same for all replicas."""
    program: int = 0
    """Of the program that finishes the step."""


NOTHING_COMPARED = StartDigests()


AttemptDigest: TypeAlias = tuple[int, int]
"""The digest of a contribution, as two integers of 31 bits."""

NO_ATTEMPT: AttemptDigest = (0, 0)


class AttemptWords:
    """The digests of a contribution that is verified, by process."""

    def __init__(self) -> None:
        self.own = NO_ATTEMPT
        """The digest of this process, or what it sends in place of it. `NO_ATTEMPT` if it has computed none."""
        self.received: list[AttemptDigest] = []
        """The digests of all processes."""

    def collect(self) -> tuple[int, ...]:
        return self.own

    def receive(self, words: np.ndarray) -> None:
        self.received = [(one, other) for one, other in words.tolist()]


class StopWish:
    """The wish of a process to stop. It arrives at the same step in all processes."""

    def collect(self) -> tuple[int, ...]:
        return (int(get_agreement().wishes_to_stop),)

    def receive(self, words: np.ndarray) -> None:
        get_agreement().has_heard_stop_wish = bool(words.any())


class StepWords:
    """What a process sends about a step. It is (pass, batch, digest of the rows, `StartDigests`)."""

    def __init__(self, batch: GlobalBatch, start: StartDigests) -> None:
        self._batch = batch
        self._start = start

    def collect(self) -> tuple[int, ...]:
        """Collect the integers of this process."""
        pass_, number = self._batch.position or NO_POSITION
        return pass_, number, self._batch.digest, *self._start

    def receive(self, words: np.ndarray) -> None:
        """Refuse processes with other rows or another start. `words` has a row for each process."""
        check_same_rows(words[:, :3])
        check_same_start(words)


def digest_values(values: Iterable[tuple[int, AnyArray]]) -> int:
    """Digest numbered arrays, in 31 bits. It is 0 if there are none."""
    digest = 0
    for number, value in values:
        array = np.ascontiguousarray(value).reshape(-1)
        digest = zlib.crc32(f"{number} {array.dtype}".encode(), digest)
        digest = zlib.crc32(array.view(np.uint8).data, digest)
    return digest >> 1


def check_same_rows(words: np.ndarray) -> None:
    """Refuse processes that have read different rows. `words` has a row for each process."""
    positions: list[Position] = [(pass_, number) for pass_, number in words[:, :2].tolist()]
    digests = words[:, 2].tolist()
    other = next((process for process, of_process in enumerate(words.tolist()) if of_process != words[0].tolist()), None)
    if other is None:
        return
    if positions[other] != positions[0]:
        raise ValueError(
            f"Process 0 is at {describe_position(positions[0])}, and process {other} at {describe_position(positions[other])}: their data "
            f"have other lengths. {WHOLE_DATA}"
        )
    raise ValueError(
        f"{describe_position(positions[0]).capitalize()} has other rows in process {other} than in process 0 (digests {digests[other]:08x} "
        f"and {digests[0]:08x}). {WHOLE_DATA}"
    )


def check_same_start(words: np.ndarray) -> None:
    """Refuse processes with other values or another program. `words` has a row for each process."""
    for column, (what, instead) in enumerate((ASSIGNED, CONSTANTS, PROGRAM), start=3):
        digests = words[:, column].tolist()
        other = next((process for process, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            position = describe_position((int(words[0, 0]), int(words[0, 1]))).capitalize()
            raise ValueError(f"{position} {what} in process {other} than in process 0. {instead}")


ASSIGNED = (
    "starts from other values of variables",
    "Since the step before, one of these processes has assigned a weight, a learning rate or another variable, and the other one has not, or has "
    "assigned another value. Let every process assign the same: a callback that changes the training belongs to all of them, and only "
    "what logs or saves to process 0.",
)
CONSTANTS = (
    "starts from other arguments",
    "What strategy.run is given beside the batch is the same for all replicas. Let every process pass the same; what "
    "differs by replica belongs to the dataset.",
)
PROGRAM = (
    "is computed by another program",
    "A number, an array or a branch in the code of a layer, a loss, the optimizer or the step is another one there, such as a setting of the "
    "optimizer or of JAX, or numbers drawn without a seed. Let every process run the same code with the same constants: `unisono audit` shows "
    "the line.",
)

WHOLE_DATA = (
    "Every process is given the whole data and computes its part, so all must be given the same, in the same order: seed every shuffle, and do "
    "not shard by process."
)


def describe_position(position: Position) -> str:
    return "a batch" if position == NO_POSITION else f"batch {position[1]} of pass {position[0]}"


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

    def begin(self, batches: Sequence[GlobalBatch], constants: Sequence[AnyArray]) -> None:
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
