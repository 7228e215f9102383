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
    """The position of the first replica among those with rows."""
    row: Whole = 0
    """Its first row."""
    phase: Whole = 0
    """The first phase that is run."""
    end: Whole = 0
    """The first phase after it that is not run."""
    summing: Whole = 0
    """1 if the running sums are complete after these replicas."""
    finishing: Whole = 0
    """1 if the sums are totals over all replicas. The step ends then."""


NOTHING = CallOrders()
END = CallOrders(finishing=1)

Orders: TypeAlias = tuple[tuple[CallOrders, ...], ...]
"""The orders for a call, of each device. There is an item for the first step, and another for all that follow if it differs."""
