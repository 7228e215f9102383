"""A global batch, cut."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.division import Shards, divide, divided
from unisono.placement import Placement


def placement(replicas: int, devices: int) -> Placement:
    return Placement(replicas, tuple(jax.devices()[:devices]))


@settings(max_examples=40)
@given(st.integers(1, 50), st.integers(1, 12), st.data())
def test_every_row_goes_to_one_replica_in_order(rows, replicas, data):
    devices = data.draw(st.integers(1, min(replicas, 8)))
    batch = {"x": np.arange(rows * 3, dtype="float32").reshape(rows, 3)}, np.arange(rows), None
    parts = divided(batch, placement(replicas, devices))
    assert sum(parts.rows) == rows
    assert len(parts.rows) == min(rows, replicas)
    assert np.array_equal(np.concatenate([x["x"] for x, _, _ in parts.shards]), batch[0]["x"])
    assert np.array_equal(np.concatenate([y for _, y, _ in parts.shards]), batch[1])
    where = placement(replicas, devices)
    for replica, (x, _, _) in enumerate(parts.shards):
        assert x["x"].devices() == {where.devices[where.device_of[replica]]}


def test_keras_sees_the_shape_of_the_whole():
    (shards,) = divide((np.zeros((7, 2)),), placement(4, 2))
    assert isinstance(shards, Shards)
    assert (shards.shape, shards.dtype) == ((7, 2), np.float32)
    assert divide((shards,), placement(4, 2)) == (shards,)


def test_what_is_sent_is_a_copy():
    """A generator may write its next batch into the same array."""
    memory = np.zeros(64 * 64 * 4 + 64, "uint8")
    start = -memory.ctypes.data % 64  # where a CPU device would read in place
    for offset in (0, 16):
        array = memory[start + offset :][: 64 * 64 * 4 - 64].view("float32").reshape(-1, 16)
        array[:] = 0
        (shards,) = divide((array,), placement(2, 1))
        array[:] = 1
        assert all(float(part.sum()) == 0 for part in shards.parts)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((np.zeros((4, 2)), np.zeros(5)), "arrays of 4 and 5 rows"),
        ((np.zeros((0, 2)),), "has no rows"),
        ((np.float32(3),), "holds a scalar"),
        ((None,), "holds no array"),
        ((np.array(["a", "b"]),), "StringLookup"),
    ],
)
def test_a_batch_that_cannot_be_cut_says_why(batch, message):
    with pytest.raises(ValueError, match=message):
        divide(batch, placement(2, 1))
