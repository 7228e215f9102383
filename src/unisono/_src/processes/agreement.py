"""What processes that train together tell each other beside their sums, through the key-value store of `jax.distributed`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax

from unisono._src.jax_private import distributed
from unisono._src.processes.progress import current as progress

SLICE = 2000
"""Milliseconds."""


class AgreementError(ValueError):
    """Processes that are to train together are about to do different things."""


class Agreement:
    """Every process calls the same methods in the same order. One that is alone agrees with itself.

    Example:
        >>> Agreement().of_first("the answer", lambda: 42)
        42
    """

    def __init__(self, number: int = 0, processes: int = 1) -> None:
        self.number = number
        self.is_alone = processes == 1
        self.wishes = False
        """Whether this process wishes to stop, which the others learn with the next sum."""
        self.heard = False
        """Whether one of them has wished to, with the last sum: at the same step in all of them."""
        self._processes = processes
        self._talks = itertools.count()

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and shows for all."""
        return self.number == 0

    def told(self, about: str, what: Any) -> list[Any]:
        """What each process says, in JSON."""
        talk = next(self._talks)
        if self.is_alone:
            return [what]
        self._say(talk, about, what)
        return [self._heard(talk, about, number) for number in range(self._processes)]

    def meet(self, about: str) -> None:
        """Until all have come here."""
        self.told(about, None)

    def of_first(self, about: str, find: Callable[[], Any]) -> Any:
        """What process 0 finds, in JSON, or the error that it raises; the others do not look."""
        talk = next(self._talks)
        if not self.is_first:
            return self._heard(talk, about, 0)
        try:
            with progress().busy(about):
                found = find()
        except Exception as error:
            if not self.is_alone:
                self._say(talk, about, None, error)
            raise
        if not self.is_alone:
            self._say(talk, about, found)
        return found

    def any_(self, about: str, mine: bool) -> bool:
        """Whether one of them says so."""
        return any(self.told(about, mine))

    def check(self, mine: dict[str, Any]) -> None:
        """All must say the same."""
        all_ = self.told("what must be the same", mine)
        for number, other in enumerate(all_):
            for name, value in other.items():
                if value != all_[0][name]:
                    raise AgreementError(
                        f"The processes do not agree on {name}: process 0 has {all_[0][name]}, and process {number} has {value}. Start the "
                        f"same program, with the same arguments, in every process."
                    )

    def stops(self, wish: bool) -> bool:
        """Between two steps: whether all stop here, because this process wishes to, or one of the others did with the last sum."""
        if self.is_alone:
            return wish
        self.wishes = wish
        return self.heard

    def begin_anew(self) -> None:
        """Nobody wishes to stop any more."""
        self.wishes = self.heard = False

    def _say(self, talk: int, about: str, what: Any, error: Exception | None = None) -> None:
        words = None if error is None else [isinstance(error, OSError), str(error)]
        distributed.client().key_value_set(f"unisono/{talk}/{self.number}", json.dumps([about, what, words]))

    def _heard(self, talk: int, about: str, number: int) -> Any:
        theirs, what, error = json.loads(self._text(f"unisono/{talk}/{number}", about))
        if theirs != about:
            raise AgreementError(
                f"Process {number} asks all others about {theirs}, and process {self.number} about {about}. Call whatever builds, trains, saves "
                f"or restores in every process, in the same order: only process 0 writes."
            )
        if error is not None:
            is_of_system, text = error
            raise (OSError if is_of_system else AgreementError)(f"Process {number} says: {text}")
        return what

    def _text(self, key: str, about: str) -> str:
        """Waits as long as it takes: the watch ends this process where nobody will come. In slices, between which signals are heard."""
        with progress().waiting(f"to hear of {about}"):
            while True:
                try:
                    return distributed.client().blocking_key_value_get(key, SLICE)
                except jax.errors.JaxRuntimeError as error:
                    if not str(error).startswith("DEADLINE_EXCEEDED"):
                        raise


_current = [Agreement()]


def current() -> Agreement:
    """Of the processes that train together; alone until a strategy has begun one."""
    return _current[0]


def begin(number: int, processes: int) -> Agreement:
    """From now on these train together. One a process, as `jax.distributed`."""
    if current().is_alone:
        _current[0] = Agreement(number, processes)
    return current()
