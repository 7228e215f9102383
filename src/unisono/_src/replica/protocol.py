"""The protocol between a step and what its replicas run: pure functions of a state, whoever wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from unisono._src.replica.contribution import Contribution

State = tuple[list[Any], ...]
"""Groups of arrays; for most steps those of Keras' loops."""


class Functions(Protocol):
    """What a step of R replicas runs. All but the looks and `check` are traced."""

    alone: bool
    """Whether there is one replica: its state is then the whole one, as in plain Keras, and nothing is merged."""

    def contribution(
        self, state: State, batch: Any, replica: Any, share: Any, divisors: Any, constants: Any
    ) -> tuple[Contribution, Any]:
        """(what one replica hands on, its outputs, which stay what they are and where they are).

        Args:
            state: The groups of the state.
            batch: The replica's rows.
            replica: Its number.
            share: Its share of the rows of the global batch.
            divisors: What each loss term of the global batch is divided by.
            constants: Arrays that are the same for every replica.
        """
        ...

    def divisors(self, state: State, batch: Any, replica: Any, share: Any, constants: Any) -> list[Any]:
        """The divisor of each loss term on these rows: a Python number, a traced number, or None."""
        ...

    def finished(self, state: State, total: Contribution, rows: Any, present: Any) -> tuple[State, list[Any]]:
        """(new state, for each counter whether the replicas disagree on it), from the total of the replicas that have rows."""
        ...

    def results(self, state: State) -> dict[str, Any]:
        """What the state's metrics say."""
        ...

    def alone_by_itself(self, state: State, batch: Any) -> tuple[State, dict[str, Any]] | None:
        """(new state, logs) of one replica alone whose step is no sum of contributions; None where it is."""
        ...

    def read(self) -> list[bool]:
        """Which groups of the state replicas read."""
        ...

    def scales(self) -> list[tuple[int, int]]:
        """The arrays that replicas read beside those groups: (group, position in it)."""
        ...

    def look(self, state: State, batch: Any, shards: Sequence[range], constants: Any) -> bool:
        """Look at a global batch on the host before it is trained on, and return whether what replicas compute is another program now.

        Args:
            state: The state before the step.
            batch: The global batch.
            shards: The rows of each replica that has some.
            constants: As for `contribution`.
        """
        ...

    @property
    def is_looked_at(self) -> bool:
        """Whether a look finds something to measure."""
        ...

    @property
    def is_undecided(self) -> bool:
        """Whether the looks so far left something open, so that the next batch is looked at as well."""
        ...

    def check(self, disagree: list[Any]) -> None:
        """After a step: raises where replicas disagree on a counter."""
        ...
