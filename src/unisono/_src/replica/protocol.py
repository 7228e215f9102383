"""The protocol between a step and its replicas: pure functions of a state, from Keras' steps or from user code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import keras

from unisono._src.replica.contribution import Contribution
from unisono._src.typing import Array, Logs, PyTree, Shape

State: TypeAlias = tuple[list[Array], ...]
"""Groups of arrays. Most steps have the groups of Keras' loops."""

RecordedVariables: TypeAlias = list[tuple[str, list[keras.Variable]]]
"""(kind, variables) of what is recorded of a step: gradients, then the groups of the state without the metrics."""

Divisor: TypeAlias = float | Array | None
"""A replica's part of the divisor of a loss term: a Python number, a traced number, or None where the term has no divisor."""


class ReplicaComputation(Protocol):
    """The functions that a step of R replicas runs. All but `probe` and the checks are traced."""

    has_one_replica: bool
    """Whether there is one replica. It then has the whole state, as in plain Keras, and nothing is merged."""

    def contribution(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, divisors: Array | None, constants: Sequence[Array]
    ) -> tuple[Contribution, Sequence[Array]]:
        """Return (the replica's contribution, its outputs). Outputs are not added up: they stay on the replica's device.

        Args:
            state: The groups of the state.
            batch: The replica's rows.
            replica: Its number.
            row_fraction: Its rows over the rows of the global batch.
            divisors: The loss divisors of the global batch.
            constants: Arrays that are the same for every replica.
        """
        ...

    def divisors(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, constants: Sequence[Array]
    ) -> Sequence[Divisor]:
        """Return the divisor of each loss term on these rows."""
        ...

    def finish_step(self, state: State, total: Contribution, rows: Array, present: Array) -> tuple[State, list[Array]]:
        """Return (new state, for each counter whether replicas disagree on it), from the total of the replicas.

        Args:
            state: The state before the step.
            total: The sum of all contributions.
            rows: The rows of the global batch.
            present: How many replicas have rows.
        """
        ...

    def results(self, state: State) -> Logs:
        """Return the logs of the state's metrics."""
        ...

    @property
    def has_own_logs(self) -> bool:
        """Return whether logs are others than these results; known after a trace."""
        ...

    def read_loss(self, part: Contribution, total: Contribution) -> Array:
        """Return a part of the loss of a step: the parts of all replicas add up to the loss, which is that of their total.

        `UNTOLD_LOSS` where the step does not tell its loss.
        """
        ...

    def list_recorded(self) -> RecordedVariables:
        """Return the variables of what is recorded of a step. It is not traced."""
        ...

    def read(self) -> list[bool]:
        """Return, for each group of the state, whether replicas read it."""
        ...

    def scales(self) -> list[tuple[int, int]]:
        """Return the arrays that replicas read beside those groups, as (group, position in it)."""
        ...

    def probe(self, state: State, batch: PyTree, shards: Sequence[range], constants: Sequence[Array]) -> bool:
        """Probe a global batch on the host before it is trained on, and return whether replicas now compute another program.

        Args:
            state: The state before the step.
            batch: The global batch.
            shards: The rows of each replica that has some.
            constants: As for `contribution`.
        """
        ...

    def check_draws(self, draws_of: Callable[[int], Sequence[Shape]], rows: int) -> None:
        """Warn before the first step of replicas that draw the same random numbers for their rows.

        Args:
            draws_of: The shapes of random numbers that depend on no argument of `contribution`, for a number of rows.
            rows: The rows of a replica.
        """
        ...

    @property
    def needs_probe(self) -> bool:
        """Return whether a probe has something to measure."""
        ...

    @property
    def is_undecided(self) -> bool:
        """Return whether the probes so far left a question open, so that the next batch is probed as well."""
        ...

    def check(self, disagree: list[Array]) -> None:
        """Raise after a step where replicas disagree on a counter."""
        ...
