"""The values between the step program and a step in shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from unisono._src.engine.state import State
from unisono._src.typing import Array, Logs, PyTree

Sums: TypeAlias = list[list[Array]]
"""For each phase what all shards have added up."""


class ShardWork(NamedTuple):
    """The results of one shard in one phase."""

    added: list[Array]
    """Added up over all shards."""
    outputs: list[Array]
    """Left on the shard's device."""
    kept: list[Array]
    """Read by the same shard in a later phase."""


class StepEnd(NamedTuple):
    """The results of a step."""

    state: State
    logs: Logs
    gradients: list[Array]
    """The gradients as the optimizer takes them. A step that does not report them has none."""
    loss: Array
    """`UNTOLD_LOSS` if the step does not report it."""


class Known(NamedTuple):
    """The values that are the same for all shards."""

    state: State
    """The state before the step."""
    totals: Sums
    """The totals of the phases so far."""
    made: list[list[Array]]
    """What was computed before each phase."""
    constants: Sequence[Array]
    """Arrays that are the same for every replica and step."""


class InspectedProgram(NamedTuple):
    """A program that computes the step, with its arguments. The state and the batch come first."""

    function: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    batch: PyTree
    rows: range
    """The rows of the global batch that the batch has."""


Part: TypeAlias = tuple[list[Array | None], Array | None]
"""A replica's parts of the gradients, and of the loss; None for what is no sum of parts."""
