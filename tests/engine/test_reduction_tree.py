"""The order of the sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono._src.engine import reduction_tree
from unisono._src.placement import split_evenly


def bracketed(span: range) -> str:
    return reduction_tree.sum_tree(span, lambda s: len(s) == 1, lambda s: str(s.start), lambda a, b: f"({a}{b})") or ""


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, "0"), (2, "(01)"), (3, "((01)2)"), (4, "((01)(23))"), (6, "(((01)(23))(45))"), (7, "(((01)(23))((45)6))")],
)
def test_the_left_half_is_the_largest_power_of_two_below(count, expected):
    assert bracketed(range(count)) == expected


@given(st.integers(1, 40).flatmap(lambda r: st.tuples(st.just(r), st.integers(1, r))))
def test_every_placement_builds_the_same_tree(case):
    replicas, devices = case
    everyone, nodes = range(replicas), {}
    for block in split_evenly(replicas, devices):
        spans = reduction_tree.list_subtrees(block, everyone)
        assert [r for span in spans for r in span] == list(block)
        assert len(spans) <= max(1, 2 * (len(block)).bit_length())
        nodes |= {span: bracketed_in(span) for span in spans}
    total = reduction_tree.sum_tree(everyone, nodes.__contains__, nodes.__getitem__, lambda a, b: f"({a} {b})")
    assert total == bracketed_in(everyone)


def bracketed_in(span: range) -> str:
    return reduction_tree.sum_tree(span, lambda s: len(s) == 1, lambda s: str(s.start), lambda a, b: f"({a} {b})") or ""


@given(st.integers(1, 40).flatmap(lambda r: st.tuples(st.just(r), st.integers(0, r))))
def test_replicas_without_rows_add_nothing_not_even_a_zero(case):
    replicas, present = case
    total = reduction_tree.sum_tree(
        range(replicas), lambda s: len(s) == 1, lambda s: [s.start] if s.start < present else None, list.__add__
    )
    assert total == (list(range(present)) or None)


def test_a_device_holds_a_logarithm_of_its_replicas():
    """Sums are made as soon as two neighbours are there."""
    live, most = 0, 0

    def leaf(span: range) -> int:
        nonlocal live, most
        live += 1
        most = max(most, live)
        return 1

    def add(a: int, b: int) -> int:
        nonlocal live
        live -= 1
        return a + b

    assert reduction_tree.sum_tree(range(64), lambda s: len(s) == 1, leaf, add) == 64
    assert most == 7
