"""A global batch on the host, and its rows on the way to the devices."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sizes import cases
from unisono._src.engine import global_batch
from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.global_batch import (
    ALIGNMENT,
    PAST_CACHES_BYTES,
    BatchArray,
    allocate_blocks,
    as_global_batch,
    select_rows,
    send_rows,
    wrap_arrays,
)


@settings(max_examples=cases(10, 40))
@given(st.integers(1, 30), st.integers(1, 3), st.data())
def test_rows_of_several_batches_arrive_in_order(rows, count, data):
    batches = [
        ({"x": np.arange(rows * 3, dtype="float64").reshape(rows, 3) + 100 * b}, np.arange(rows) + 1000 * b, None)
        for b in range(count)
    ]
    start = data.draw(st.integers(0, rows - 1))
    mine = range(start, data.draw(st.integers(start + 1, rows)))
    device = data.draw(st.sampled_from(jax.devices()))
    there = send_rows([as_global_batch(batch) for batch in batches], (mine,), (count + 2, len(mine)), get_mesh((device,)))
    assert there[0]["x"].shape == (count + 2, len(mine), 3)
    assert (there[0]["x"].dtype, there[1].dtype, there[2]) == (np.float32, np.int32, None)
    assert there[1].devices() == {device}
    for b, (x, y, _) in enumerate(batches):
        assert np.array_equal(there[0]["x"][b], x["x"][mine.start : mine.stop])
        assert np.array_equal(there[1][b], y[mine.start : mine.stop])


@settings(max_examples=40)
@given(
    st.integers(1, 30),
    st.sampled_from(["float32", "float64", "int64", "uint8", "bfloat16", "bool"]),
    st.sampled_from(["as it is", "every other", "transposed"]),
    st.sampled_from([PAST_CACHES_BYTES, 0]),
    st.data(),
)
def test_chosen_rows_arrive_from_wherever_they_lie(count, dtype, how, many_bytes, data):
    """They are read when they are sent, into the place that a device reads, unless they must be converted on the way.

    Where they are `many_bytes`, native code copies them.
    """
    source = np.arange(60 * 4).reshape(60, 4).astype(jax.numpy.dtype(dtype))
    source = {"as it is": source, "every other": source[::2], "transposed": np.asfortranarray(source)}[how]
    rows = np.array(data.draw(st.lists(st.integers(0, len(source) - 1), min_size=count, max_size=count)))
    batch = as_global_batch(wrap_arrays((select_rows(source, rows), np.zeros(count)), (1, 2), copy=False))
    assert (batch.rows, batch.position) == (count, (1, 2))
    start = data.draw(st.integers(0, count - 1))
    mine = range(start, data.draw(st.integers(start + 1, count)))
    expected = source[rows].astype(jax.dtypes.canonicalize_dtype(source.dtype))
    for batches in ([batch], [batch, batch]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(global_batch, "PAST_CACHES_BYTES", many_bytes)
            there = np.asarray(send_rows(batches, (mine,), (len(batches) + 1, len(mine)), get_mesh((jax.devices()[0],)))[0])
        for number in range(len(batches)):
            assert there[number].tobytes() == expected[mine.start : mine.stop].tobytes()
    assert batch.leaves[0].array.tobytes() == source[rows].tobytes()


def test_keras_sees_the_shape_of_the_whole():
    (rows,) = wrap_arrays((np.zeros((7, 2)),))
    assert isinstance(rows, BatchArray)
    assert (rows.shape, rows.dtype) == ((7, 2), np.float32)


def test_what_is_held_is_a_copy_unless_nobody_writes():
    """A generator may write its next batch into the same array."""
    array = np.zeros((4, 3))
    (copied,), (same,) = wrap_arrays((array,)), wrap_arrays((array,), copy=False)
    array[:] = 1
    assert copied.array.sum() == 0
    assert same.array.sum() == 12


@given(st.integers(0, 5), st.integers(1, 9), st.sampled_from(["float32", "int8", "bool"]))
def test_room_begins_where_a_device_can_read_it_in_place(rows, columns, dtype):
    (array,) = allocate_blocks(1, (rows, columns), np.dtype(dtype))
    assert (array.shape, array.dtype) == ((rows, columns), np.dtype(dtype))
    if rows:  # where NumPy says that an array without elements begins means nothing
        assert array.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((np.zeros((4, 2)), np.zeros(5)), r"arrays of 4 and 5 rows.*\. If each item .* is one row, .*dataset.batch\(n\)"),
        ((np.zeros((0, 2)),), "has no rows"),
        (
            (np.float32(3),),
            r"holds a scalar.*dataset.batch\(n\).*np\.full\(rows, weight\).*strategy.run\(step, args=\(batch, number\)\)",
        ),
        (
            (np.ones((4, 2)), np.ones((28, 2))),
            r"arrays of 4 and 28 rows.*7 rows of one array belong.*reshape\(\(4, 7, \.\.\.\)\)",
        ),
        ((np.ones((4, 2)), np.ones((6, 2))), r"arrays of 4 and 6 rows.*dataset.batch\(n\).*as nodes to a graph, pad them"),
        ((None,), "holds no array"),
        ((np.array(["a", "b"]),), "StringLookup"),
    ],
)
def test_a_batch_that_cannot_be_cut_says_why(batch, message):
    with pytest.raises(ValueError, match=message):
        wrap_arrays(batch)


def test_one_replica_takes_an_uneven_batch_whole():
    wrapped = wrap_arrays((np.ones((4, 2)), np.ones(6), np.float32(3)), (0, 7), is_cut=False)
    whole = as_global_batch(wrapped, is_cut=False)
    assert (whole.rows, whole.counted_rows, whole.position) == (1, 4, (0, 7))
    assert [array.shape for array in whole.tree()] == [(4, 2), (6,), ()]
    with pytest.raises(ValueError, match="Batch 7 holds a scalar"):
        as_global_batch(wrapped)
    even = as_global_batch(wrap_arrays((np.ones((4, 2)), np.ones(4)), is_cut=False), is_cut=False)
    assert (even.is_whole, even.rows, even.counted_rows) == (False, 4, 4)


@pytest.mark.parametrize(("batch", "message"), [((None,), "holds no array"), ((np.zeros((0, 2)),), "has no rows")])
def test_one_replica_refuses_a_batch_without_rows(batch, message):
    with pytest.raises(ValueError, match=message):
        wrap_arrays(batch, is_cut=False)


READ = []
"""The rows that were read of arrays on disk."""


class OnDisk(np.memmap):
    """An array on disk that notes which rows are read."""

    def __getitem__(self, rows):
        found = super().__getitem__(rows)
        READ.append(np.asarray(found).ravel().tolist())
        return found


@pytest.mark.parametrize("chosen", [None, np.array([7, 2, 5])])
def test_of_an_array_on_disk_one_row_is_compared(tmp_path, chosen):
    """In turn, so that arrays that differ anywhere are found. The other rows belong to other processes."""
    np.arange(8, dtype="uint8").tofile(tmp_path / "rows")
    on_disk, in_memory = OnDisk(tmp_path / "rows", "uint8", "r"), np.arange(8, dtype="uint8")
    rows = in_memory if chosen is None else chosen
    for number in range(10):
        READ.clear()
        batch, other = (as_global_batch(BatchArray(source, (0, number), chosen=chosen)) for source in (on_disk, in_memory))
        assert batch.digest != other.digest, "of the others, all rows"
        assert [[rows[number % len(rows)]]] == READ
