"""The orders for one call of the step program.

A call has orders for its first step, and for all that follow: one that is called for the end of a step may go on with the replicas of the next.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from unisono._src.typing import Array

Whole: TypeAlias = int | Array
"""A whole number; a tracer inside of the program."""


class CallOrders(NamedTuple):
    """The orders for a step of a call; whole numbers."""

    steps: Whole = 1
    """The number of steps of the call, in the orders for the first."""
    since: Whole = 0
    """The step of the call whose rows come first."""
    first: Whole = 0
    """The first replica that is run."""
    replicas: Whole = 0
    """The number of replicas that are run."""
    before: Whole = 0
    """The number of replicas that were added to the same sum already."""
    place: Whole = 0
    """The place of the first replica among those that have rows."""
    row: Whole = 0
    """Its first row."""
    phase: Whole = 0
    """The first phase that is run."""
    end: Whole = 0
    """The first phase after it that is not run."""
    summing: Whole = 0
    """1 where the running sums are complete after these replicas."""
    finishing: Whole = 0
    """1 where the sums are those of all replicas, and end the step."""


NOTHING = CallOrders()
END = CallOrders(finishing=1)

Orders: TypeAlias = tuple[tuple[CallOrders, ...], ...]
"""The orders for a call: of each device for the first step, and for all that follow where these are others."""
