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

from unisono._src.engine import reduction_tree
from unisono._src.engine.step import running_sums
from unisono._src.kernels.native.library import load_kernels
from unisono._src.kernels.native.step_calls import call_push
from unisono._src.kernels.rewriting import rewrite_function
from unisono._src.placement import split_evenly

MOST = 12
WIDTH = 149


@functools.cache
def summed(platform):
    """Counts up values in two turns, as two programs do for replicas of two sizes, and folds: on a CPU by the kernel, if there is one."""

    def run(values, start, first, count):
        def push(i, held):
            one, few, many = jnp.split(values[start + i], [1, 21])
            tree = {"a": one, "b": few.reshape(4, 5), "c": jnp.int32(i), "d": many.reshape(2, -1)}
            return running_sums.push_tree(held, i, tree)

        held = {"float32": jnp.full((running_sums.count_places(MOST), 192), jnp.nan), "int32": jnp.zeros((MOST, 64), "int32")}
        held = lax.fori_loop(0, first, push, held)
        held = lax.fori_loop(first, count, push, held)
        total = running_sums.get_place(running_sums.fold_sums(held, count))
        return total["float32"][:WIDTH], total["float32"][WIDTH:], total["int32"][0]

    return jax.jit(rewrite_function(run, platform))


@pytest.mark.parametrize("platform", ["cpu", "another"])
@given(st.integers(1, MOST).flatmap(lambda r: st.tuples(st.just(r), st.integers(1, r), st.integers(1, r))), st.integers(0, 99))
def test_any_placement_and_any_number_of_empty_replicas(platform, case, seed):
    replicas, devices, present = case
    rng = np.random.default_rng(seed)
    values = np.asarray(rng.standard_normal((MOST, WIDTH)) * 10.0 ** rng.integers(-4, 5, (MOST, 1)), "float32")
    nodes = {}
    for block in split_evenly(replicas, devices):
        for span in reduction_tree.list_subtrees(block, range(replicas)):
            here = len(range(span.start, min(span.stop, present)))
            first = rng.integers(0, here + 1)
            if here:
                nodes[span], behind, numbers = map(np.asarray, summed(platform)(values, span.start, first, here))
                assert not behind.any()
                assert numbers == sum(range(here))
            else:
                nodes[span] = None
    total = reduction_tree.sum_tree(range(replicas), nodes.__contains__, nodes.__getitem__, np.add)
    leaves = [values[r] if r < present else None for r in range(replicas)]
    expected = reduction_tree.sum_tree(range(replicas), lambda s: len(s) == 1, lambda s: leaves[s.start], np.add)
    assert np.array_equal(total, expected)


@pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason))
def test_programs_for_cpus_call_the_kernel():
    args = np.zeros((MOST, WIDTH), "float32"), 0, 1, 2
    assert [summed(platform).lower(*args).as_text().count("@unisono_push_contribution") for platform in ("cpu", "another")] == [
        2,
        0,
    ]


@pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason))
@pytest.mark.parametrize("before", [2, 3, 4])
def test_the_kernel_writes_no_place_that_is_not_there(before):
    """The third and the fifth contribution need two places, and the fourth needs them to read."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="A stack of sums has too few places"):
        jax.block_until_ready(call_push(jnp.zeros((1, 64)), jnp.int32(before), [jnp.ones(3)]))


@pytest.mark.parametrize("replicas", range(1, 40))
def test_there_is_a_place_for_every_sum_that_is_held(replicas):
    assert running_sums.count_places(replicas) == max(count.bit_count() for count in range(1, replicas + 1))
