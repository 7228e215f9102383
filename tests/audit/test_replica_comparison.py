"""What the audit counts of the rows that replicas saw, beside those of R = 1."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono._src.audit.audit_report import ReplicaRows
from unisono._src.audit.replica_comparison import count_rows
from unisono._src.audit.trace_comparison import ProcessTrace


def count(expected, *shards):
    """Return (duplicates, missing) of each replica in two equal steps."""
    whole, cut = (ProcessTrace({"rows": [[list(rows) for rows in step]] * 2}) for step in ([expected], shards))
    counted = count_rows(whole, cut, len(shards))
    assert [rows.rows for rows in counted] == [2 * len(shard) for shard in shards]
    return [(rows.duplicates // 2, rows.missing // 2) for rows in counted]


@pytest.mark.parametrize(
    ("shards", "counted"),
    [
        (("ab", "cd", "ef"), [(0, 0), (0, 0), (0, 0)]),
        (("ef", "ab", "cd"), [(0, 0), (0, 0), (0, 0)]),  # each row once, in other places
        (("ab", "ab", "ab"), [(0, 0), (2, 2), (2, 2)]),  # a dataset that is not distributed
        (("ab", "bc", "ef"), [(0, 0), (1, 1), (0, 0)]),  # a window that is off by one
        (("aa", "cd", "ef"), [(1, 1), (0, 0), (0, 0)]),
        (("ab", "cd", ""), [(0, 0), (0, 0), (0, 2)]),
        (("ab", "de"), [(0, 0), (0, 2)]),  # each replica leaves out its last row
    ],
)
def test_rows_that_a_replica_saw_twice_or_not_at_all(shards, counted):
    assert count("abcdef", *shards) == counted


@given(st.permutations("abcdefgh"), st.lists(st.integers(0, 8), min_size=2, max_size=4))
def test_any_division_of_the_rows_has_each_once(rows, cuts):
    bounds = [0, *sorted(cuts), len(rows)]
    shards = [rows[start:end] for start, end in itertools.pairwise(bounds)]
    assert count("abcdefgh", *shards) == [(0, 0)] * len(shards)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=8, max_size=8))
def test_each_row_that_came_again_took_the_place_of_a_missing_one(rows):
    counted = count("abcdefgh", rows[:3], rows[3:5], rows[5:])
    assert sum(duplicates for duplicates, _ in counted) == sum(missing for _, missing in counted) == 8 - len(set(rows))


def test_counts_of_steps_are_added_up():
    whole = ProcessTrace({"rows": [[["a", "b"]], [["c", "d"]], [["e", "f"]]]})
    cut = ProcessTrace({"rows": [[["a"], ["a"]], [["c"], ["d"]]]})
    assert count_rows(whole, cut, 2) == (ReplicaRows(0, 2, 0, 0), ReplicaRows(1, 2, 1, 1))
