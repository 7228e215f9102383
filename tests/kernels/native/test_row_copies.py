"""Copies of chosen rows on the host, beside NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono._src.kernels.native.library import load_kernels
from unisono._src.kernels.native.step_calls import copy_rows

UNTOUCHED = 171

pytestmark = pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels()))


@given(st.data())
def test_rows_are_copied_and_nothing_beside_them(data):
    """Rows have any size, and begin anywhere in a line of a cache."""
    rows, row_bytes = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 300))
    array = np.random.default_rng(rows).integers(0, 256, (rows, row_bytes), np.uint8)
    chosen = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=20)), np.int64)
    before, behind = data.draw(st.integers(0, 80)), data.draw(st.integers(0, 80))
    memory = np.full(before + len(chosen) * row_bytes + behind, UNTOUCHED, np.uint8)
    target = memory[before : len(memory) - behind].reshape(-1, row_bytes)
    assert copy_rows(array, chosen, target)
    assert np.array_equal(target, array[chosen])
    assert (memory[:before] == UNTOUCHED).all()
    assert (memory[len(memory) - behind :] == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", ["int32", "uint64", "int64"])
def test_numbers_of_rows_have_any_dtype_and_layout(dtype):
    array = np.arange(60, dtype="float32").reshape(20, 3)
    chosen = np.arange(20, dtype=dtype)[::-3]
    target = np.empty((len(chosen), 3), "float32")
    assert copy_rows(array, chosen, target)
    assert np.array_equal(target, array[chosen])


def test_a_number_outside_of_the_array_reads_no_other_memory():
    array = np.arange(4, dtype="int32")[:, None]
    target = np.empty((2, 1), "int32")
    assert copy_rows(array, np.array([-7, 99]), target)
    assert target.ravel().tolist() == [0, 3]
