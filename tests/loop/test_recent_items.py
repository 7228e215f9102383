"""Caches and counts of compilations have a bound."""

from __future__ import annotations

import numpy as np

import unisono as un
from unisono._src.loop import function
from unisono._src.loop.recent_items import RecentItems, count_event


def test_the_items_that_were_used_longest_ago_are_forgotten():
    items = RecentItems(2)
    items["a"] = 1
    items["b"] = 2
    items.move_to_end("a")
    items["c"] = 3
    assert dict(items) == {"a": 1, "c": 3}


def test_counts_of_what_is_asked_for_stay():
    counts = RecentItems(2)
    assert [count_event(counts, key) for key in "aabacaa"] == [1, 2, 1, 3, 1, 4, 5]


def test_a_function_keeps_few_compiled_forms(monkeypatch):
    monkeypatch.setattr(function, "MOST_TRACED", 2)
    traced = []

    def add_one(x):
        traced.append(x.shape)
        return x + 1

    compiled = un.function(add_one)
    for rows in (1, 2, 3):
        compiled(np.zeros(rows, np.float32))
    before = len(traced)
    compiled(np.zeros(3, np.float32))
    assert len(traced) == before
    compiled(np.zeros(1, np.float32))
    assert len(traced) > before
