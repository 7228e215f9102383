"""The side of a strategy that lower rooms see: the loop, the hooks of fit, and the checks that they call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Protocol

import keras

from unisono._src.exchange.protocol import Exchange
from unisono._src.ownership import OwnedObjects
from unisono._src.placement import Placement


class ReplicaStrategy(Protocol):
    """A strategy as the loop and the hooks of fit use it, in every process in the same order."""

    @property
    def placement(self) -> Placement: ...

    @property
    def exchange(self) -> Exchange: ...

    @property
    def owned(self) -> OwnedObjects: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def num_replicas_in_sync(self) -> int: ...

    @functools.cached_property
    def on_lead(self) -> tuple[Placement, Exchange]:
        """Return the placement and the exchange of steps that are not compiled."""
        ...

    @property
    def writes(self) -> bool:
        """Return whether this process writes files and shows progress for all processes."""
        ...

    def acting(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which user code finds this strategy by `get_strategy`."""
        ...

    def announce(self) -> None:
        """Print once that R came from the machine."""
        ...

    def warn_of_slow_steps(self, what: str) -> None:
        """Warn once that a model or a function is not compiled."""
        ...

    def agree(self, variables: list[keras.Variable]) -> None:
        """Give the variables the same values in all processes, before they are first used."""
        ...

    def check_alike(self, what: Mapping[str, object]) -> None:
        """Refuse values that differ between processes; the keys are names for the message."""
        ...

    def check_use(self, model: keras.Model) -> None:
        """Refuse to train the model inside the scope of another strategy."""
        ...

    def check_attributes(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Refuse attributes that were set on an optimizer and that it does not have."""
        ...

    def check_variables(self, variables: list[keras.Variable], assigned: list[keras.Variable]) -> None:
        """Refuse variables that replica code must not use or assign."""
        ...
