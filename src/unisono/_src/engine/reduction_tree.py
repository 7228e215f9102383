"""Sums in one fixed order, on every placement.

T(n) = T(largest power of two below n) + T(the rest), left to right over the replicas. A partial sum is named by the span of
replicas that it adds up; a device that runs a block of replicas can finish the spans that lie inside its block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def split_span(span: range) -> tuple[range, range]:
    """Split a span into the two spans whose sums make its sum.

    >>> split_span(range(0, 6))
    (range(0, 4), range(4, 6))
    """
    middle = span.start + (1 << ((len(span) - 1).bit_length() - 1))
    return range(span.start, middle), range(middle, span.stop)


def list_subtrees(block: range, span: range) -> list[range]:
    """List the largest spans of the tree that lie inside `block`.

    They are spans of the reduction tree over `span`, left to right.

    >>> list_subtrees(range(3, 6), range(0, 8))
    [range(3, 4), range(4, 6)]
    """
    if block.start <= span.start and span.stop <= block.stop:
        return [span]
    if span.stop <= block.start or block.stop <= span.start:
        return []
    left, right = split_span(span)
    return list_subtrees(block, left) + list_subtrees(block, right)


def sum_tree(
    span: range,
    known: Callable[[range], bool],
    value: Callable[[range], Value | None],
    add: Callable[[Value, Value], Value],
) -> Value | None:
    """Sum over `span` from the values of the known spans.

    They are read from left to right.

    None is the value of a replica without rows: nothing is added for it, not even a zero.
    """
    if known(span):
        return value(span)
    left, right = (sum_tree(half, known, value, add) for half in split_span(span))
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)
