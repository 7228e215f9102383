"""The sums of a loop are the tree's, to the bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from unisono._src import reduction_tree
from unisono._src.placement import split_evenly
from unisono._src.step import running_sums

MOST = 12


@functools.cache
def summed():
    """Counts up values in two turns, as two programs do for replicas of two sizes, and folds."""

    @jax.jit
    def run(values, start, first, count):
        def push(i, held):
            return running_sums.push_value(held, i, {"float32": values[start + i]})

        held = {"float32": jnp.full((running_sums.count_places(MOST), values.shape[1]), jnp.nan)}
        held = lax.fori_loop(0, first, push, held)
        held = lax.fori_loop(first, count, push, held)
        return running_sums.get_place(running_sums.fold_sums(held, count))["float32"]

    return run


@given(st.integers(1, MOST).flatmap(lambda r: st.tuples(st.just(r), st.integers(1, r), st.integers(1, r))), st.integers(0, 99))
def test_any_placement_and_any_number_of_empty_replicas(case, seed):
    replicas, devices, present = case
    rng = np.random.default_rng(seed)
    values = np.asarray(rng.standard_normal((MOST, 3)) * 10.0 ** rng.integers(-4, 5, (MOST, 1)), "float32")
    nodes = {}
    for block in split_evenly(replicas, devices):
        for span in reduction_tree.list_subtrees(block, range(replicas)):
            here = len(range(span.start, min(span.stop, present)))
            first = rng.integers(0, here + 1)
            nodes[span] = np.asarray(summed()(values, span.start, first, here)) if here else None
    total = reduction_tree.sum_tree(range(replicas), nodes.__contains__, nodes.__getitem__, np.add)
    leaves = [values[r] if r < present else None for r in range(replicas)]
    expected = reduction_tree.sum_tree(range(replicas), lambda s: len(s) == 1, lambda s: leaves[s.start], np.add)
    assert np.array_equal(total, expected)


@pytest.mark.parametrize("replicas", range(1, 40))
def test_there_is_a_place_for_every_sum_that_is_held(replicas):
    assert running_sums.count_places(replicas) == max(count.bit_count() for count in range(1, replicas + 1))
