"""A traced user function, with what its checks look at."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from unisono._src.keras.checks.user_code.captured_arrays import find_captured_arrays, find_replicated_arrays
from unisono._src.keras.checks.user_code.captures import Capture
from unisono._src.keras.checks.user_code.provenance import Provenance
from unisono._src.keras.ownership import OwningStrategy
from unisono._src.keras.replica.variable_discovery import Trace
from unisono._src.programs.operands import Atom
from unisono._src.typing import AnyArray, LibraryArray


@dataclasses.dataclass(frozen=True)
class InspectedCode:
    """A user function, traced on a replica's rows, with its inputs."""

    name: str
    sources: Provenance
    captures: list[Capture]
    strategy: OwningStrategy
    rows: int
    """Rows of the global batch."""
    size: int
    """Rows of the replica."""
    carried_shares: Sequence[int]
    """Positions, among the arrays of the batch, of shares of a loss that an earlier run returned."""
    has_rows: bool
    """Whether the function gets rows, or values that an earlier run made of rows."""
    trace_of: Callable[[int], Provenance] | None
    """Traces the function on another number of rows; None where it cannot be traced on others."""

    @property
    def trace(self) -> Trace:
        return self.sources.trace

    @property
    def replicas(self) -> int:
        return self.strategy.num_replicas_in_sync

    @property
    def shares(self) -> list[Atom]:
        """The jaxpr's variables that are a replica's share of a loss."""
        inputs = self.sources.program.jaxpr.invars
        return [
            *(share for _, share in self.trace.noted.get("share", [])),
            *(inputs[position] for position in self.carried_shares),
        ]

    @functools.cached_property
    def captured_arrays(self) -> list[tuple[str, LibraryArray]]:
        return find_captured_arrays(self.captures)

    @functools.cached_property
    def replicated_arrays(self) -> list[AnyArray]:
        return find_replicated_arrays(self.captures)

    def is_replicated(self, array: AnyArray) -> bool:
        """Whether an array equals one that the user has marked as replicated."""
        return any(np.array_equal(array, np.asarray(replicated)) for replicated in self.replicated_arrays)
