"""Agreements of the processes of one training. They go beside the sums, through the key-value store of `jax.distributed`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import jax

from unisono._src.processes.activity import get_activity as progress
from unisono._src.programs.private import distributed
from unisono._src.typing import Json

T = TypeVar("T")

SLICE = 2000
"""Milliseconds of one wait for an answer."""


class AgreementError(ValueError):
    """Processes that train together are about to do different things."""


class Agreement:
    """What all processes decide together. Each makes the same calls in the same order. A process that is alone agrees with
    itself.

    A process that is alone agrees with itself. Values travel as JSON: a tuple arrives as a list.

    Example:
        >>> Agreement().of_first("the answer", lambda: 42)
        42
    """

    def __init__(self, number: int = 0, processes: int = 1) -> None:
        self.number = number
        self.is_alone = processes == 1
        self.wishes_to_stop = False
        """Whether this process wishes to stop. The others learn it with the next sum."""
        self.has_heard_stop_wish = False
        """Whether the last sum brought a wish to stop. It comes at the same step in all processes."""
        self._processes = processes
        self._calls = itertools.count()

    @property
    def is_first(self) -> bool:
        """Whether this process writes and shows for all."""
        return self.number == 0

    def gather_values(self, about: str, value: T) -> list[T]:
        """Gather the values of all processes. Each sends its own."""
        call = next(self._calls)
        if self.is_alone:
            return [value]
        self._send(call, about, value)
        return [self._receive(call, about, number) for number in range(self._processes)]

    def wait_for_processes(self, about: str) -> None:
        """Wait until all processes have called this."""
        self.gather_values(about, None)

    def of_first(self, about: str, compute: Callable[[], T]) -> T:
        """Compute a value in process 0, and give it to all.

        The other processes do not call `compute`. An error in it is raised in all.
        """
        call = next(self._calls)
        if not self.is_first:
            return self._receive(call, about, 0)
        try:
            with progress().report_busy(about):
                value = compute()
        except Exception as error:
            if not self.is_alone:
                self._send(call, about, None, error)
            raise
        if not self.is_alone:
            self._send(call, about, value)
        return value

    def is_true_in_any_process(self, about: str, mine: bool) -> bool:
        """Whether any process passes True."""
        return any(self.gather_values(about, mine))

    def check(self, mine: Mapping[str, Json]) -> None:
        """Refuse values that are not the same in all processes."""
        values = self.gather_values("what must be the same", mine)
        for number, theirs in enumerate(values):
            for name, value in theirs.items():
                if value != values[0][name]:
                    raise AgreementError(
                        f"The processes do not agree on {name}: process 0 has {values[0][name]}, and process {number} has {value}. Start the "
                        f"same program, with the same arguments, in every process."
                    )

    def agree_to_stop(self, wish: bool) -> bool:
        """Whether all processes stop after this step.

        A process that is alone stops if it wishes to. Several stop if the last sum brought a wish.
        """
        if self.is_alone:
            return wish
        self.wishes_to_stop = wish
        return self.has_heard_stop_wish

    def begin_anew(self) -> None:
        """Forget all wishes to stop."""
        self.wishes_to_stop = self.has_heard_stop_wish = False

    def _send(self, call: int, about: str, value: Json, error: Exception | None = None) -> None:
        error_words = None if error is None else [isinstance(error, OSError), str(error)]
        cast(distributed.KeyValueStore, distributed.get_client()).key_value_set(
            f"unisono/{call}/{self.number}", json.dumps([about, value, error_words])
        )

    def _receive(self, call: int, about: str, number: int) -> Json:
        theirs, value, error = json.loads(self._wait_for_text(f"unisono/{call}/{number}", about))
        if theirs != about:
            raise AgreementError(
                f"Process {number} asks all others about {theirs}, and process {self.number} about {about}. Call whatever builds, trains, saves "
                f"or restores in every process, in the same order: only process 0 writes."
            )
        if error is not None:
            is_of_system, text = error
            raise (OSError if is_of_system else AgreementError)(f"Process {number} says: {text}")
        return value

    def _wait_for_text(self, key: str, about: str) -> str:
        """Wait for the value of a key, without a limit.

        The watch ends this process if another one is lost. The wait is in slices, because signals are handled only between them.
        """
        with progress().report_waiting(f"to hear of {about}"):
            while True:
                try:
                    return cast(distributed.KeyValueStore, distributed.get_client()).blocking_key_value_get(key, SLICE)
                except jax.errors.JaxRuntimeError as error:
                    if not str(error).startswith("DEADLINE_EXCEEDED"):
                        raise


_current = [Agreement()]


def get_agreement() -> Agreement:
    """Get the agreement of the processes that train together. It is of one process until a strategy begins another."""
    return _current[0]


def begin_agreement(number: int, processes: int) -> Agreement:
    """Begin the agreement of several processes. A process has one, as it has one `jax.distributed`."""
    if get_agreement().is_alone:
        _current[0] = Agreement(number, processes)
    return get_agreement()
