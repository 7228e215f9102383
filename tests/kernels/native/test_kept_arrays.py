"""Arrays that a kernel makes XLA put into memory: the same bits, and loops that XLA runs fast."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from rewritten import NEEDS_KERNELS, normal
from sizes import cases
from unisono._src.kernels.native.library import Kernels
from unisono._src.kernels.native.step_calls import keep_array
from unisono._src.kernels.products import arrays
from unisono._src.kernels.rewriting import rewrite_function

pytestmark = NEEDS_KERNELS

KEPT = "unisono_keep_array"


def pool_flat(x):
    x = lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return x.reshape(len(x), -1)


def sum_long(x):
    return x.sum((0, 1, 2))


def run_both_ways(function, *args):
    """Return the result with the kernel and without it, and the compiled program with it."""
    program = jax.jit(rewrite_function(function, "cpu")).lower(*args).compile()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "load_kernels", lambda: Kernels(None, None, "for a test"))
        without = jax.jit(rewrite_function(function, "cpu"))(*args)
    return program(*args), without, program.as_text()


@settings(max_examples=cases(20, 200))
@given(shape=st.lists(st.integers(0, 40), max_size=4), is_read_again=st.booleans())
def test_a_kept_array_is_the_same(shape, is_read_again):
    x = normal(shape)
    x.flat[:2] = [np.nan, -0.0][: x.size]

    def double(x):
        x = x + x
        return keep_array(x), x * 3 if is_read_again else 0

    kept, beside = jax.jit(double)(x)
    assert np.asarray(kept).tobytes() == (x + x).tobytes()
    if is_read_again:
        np.testing.assert_array_equal(beside, (x + x) * 3)


def test_an_argument_of_a_program_is_left_as_it_is():
    x = jax.numpy.asarray(normal((3, 4)))
    before = np.array(x)
    assert np.array_equal(jax.jit(lambda x: keep_array(x) + 1)(x), before + 1)
    assert np.array_equal(x, before)


def test_a_pooling_is_computed_before_it_is_flattened():
    kept, without, program = run_both_ways(pool_flat, normal((8, 26, 26, 32)))
    assert re.search(rf"f32\[8,13,13,32\]\S* custom-call.*{KEPT}", program)
    assert np.asarray(kept).tobytes() == np.asarray(without).tobytes()


def test_a_pooling_that_is_read_as_it_is_needs_no_call():
    pool = functools.partial(
        lax.reduce_window,
        init_value=-np.inf,
        computation=lax.max,
        window_dimensions=(1, 2, 2, 1),
        window_strides=(1, 2, 2, 1),
        padding="VALID",
    )
    assert KEPT not in run_both_ways(pool, normal((2, 8, 8, 4)))[2]


@pytest.mark.parametrize("shape", [(64, 11, 11, 64), (32, 8, 8, 16)])
def test_the_last_stage_of_a_long_sum_is_in_memory(shape):
    kept, without, program = run_both_ways(sum_long, normal(shape))
    assert KEPT in program
    assert np.asarray(kept).tobytes() == np.asarray(without).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_pooling_of_few_bits_is_left_to_xla(dtype):
    kept, without, program = run_both_ways(pool_flat, normal((2, 8, 8, 4)).astype(jax.numpy.dtype(dtype)))
    assert KEPT not in program
    assert np.asarray(kept).tobytes() == np.asarray(without).tobytes()
