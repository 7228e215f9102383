"""Where replicas and rows go."""

from __future__ import annotations

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono._src.placement import Placement, split_evenly


@given(st.integers(0, 1000), st.integers(1, 64))
def test_parts_are_contiguous_and_differ_by_one_at_most(total, parts):
    cut = split_evenly(total, parts)
    assert [i for part in cut for i in part] == list(range(total))
    sizes = [len(part) for part in cut]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_devices_run_contiguous_blocks():
    placement = Placement(8, tuple(jax.devices()[:3]))
    assert placement.blocks == (range(0, 3), range(3, 6), range(6, 8))
    assert placement.lead == jax.devices()[0]


def test_more_devices_than_replicas_are_refused():
    with pytest.raises(ValueError, match="2 devices cannot share 1 replicas.*Write devices=1, or replicas=2"):
        Placement(1, tuple(jax.devices()[:2]))


def test_no_replicas_are_refused():
    with pytest.raises(ValueError, match="replicas=0"):
        Placement(0, tuple(jax.devices()[:1]))
