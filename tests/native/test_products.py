"""The native products compute what XLA computes, for every order of dimensions that they take."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from sizes import cases
from unisono._src.native.library import load_kernels
from unisono._src.native.products import call_product
from unisono._src.xla.rewrite import rewrite_function

pytestmark = pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason))

SIZES = st.sampled_from([1, 2, 3, 7, 12, 13, 31, 33, 48, 49, 65, 100, 200])


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


@settings(max_examples=cases(60, 600))
@given(
    rows=SIZES, columns=SIZES, depth=st.sampled_from([1, 2, 5, 47, 96, 97, 500, 1023, 1025, 3000]), form=st.sampled_from(range(3))
)
def test_products(rows, columns, depth, form):
    left, right = normal((rows, depth)), normal((depth, columns), 1)
    is_left_transposed, is_right_transposed = form == 1, form == 2
    x = np.ascontiguousarray(left.T) if is_left_transposed else left
    y = np.ascontiguousarray(right.T) if is_right_transposed else right
    exact = left.astype("float64") @ right.astype("float64")
    terms = np.abs(left) @ np.abs(right)
    np.testing.assert_allclose(
        call_product(x, y, is_left_transposed, is_right_transposed), exact, rtol=0, atol=3e-7 * terms.max()
    )


@pytest.mark.parametrize("where", ["left", "right"])
def test_what_is_not_finite_stays_in_its_row_or_column(where):
    left, right = normal((50, 70)), normal((70, 33), 1)
    (left if where == "left" else right)[7, 9] = np.nan
    y = np.asarray(call_product(left, right, False, False))
    expected = np.zeros((50, 33), bool)
    expected[7 if where == "left" else slice(None), slice(None) if where == "left" else 9] = True
    np.testing.assert_array_equal(np.isnan(y), expected)


def dense(x, w):
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


@pytest.mark.parametrize("shape", [(160, 24), (20, 8, 24)])
def test_a_dense_layer_and_its_gradients_are_three_calls_without_a_transpose(shape):
    x, w = normal(shape), normal((24, 32), 1)

    def step(x, w):
        y, pull = jax.vjp(dense, x, w)
        return y, *pull(y)

    ours = jax.jit(rewrite_function(step, "cpu"))
    text = ours.lower(x, w).as_text()
    assert text.count("@unisono_multiply") == 3
    assert "stablehlo.transpose" not in text
    assert "stablehlo.dot_general" not in text
    for native, plain in zip(ours(x, w), jax.jit(step)(x, w), strict=True):
        np.testing.assert_allclose(native, plain, rtol=0, atol=1e-5 * np.abs(plain).max())


@pytest.mark.parametrize(
    ("shapes", "numbers"),
    [
        (((4, 240, 30), (4, 30, 32)), (((2,), (1,)), ((0,), (0,)))),  # a batch of products
        (((24, 4, 30), (4, 32)), (((1,), (0,)), ((), ()))),  # contracted in the middle
        (((30, 240), (32, 30)), (((0,), (1,)), ((), ()))),  # both transposed
        (((100, 30), (30, 32)), (((1,), (0,)), ((), ()))),  # of few rows
        (((100, 30), (100, 32)), (((0,), (0,)), ((), ()))),  # a gradient of few rows
    ],
)
def test_other_products_are_left_to_xla(shapes, numbers):
    x, w = map(normal, shapes)
    ours = jax.jit(rewrite_function(lambda x, w: lax.dot_general(x, w, numbers), "cpu"))
    assert "@unisono_multiply" not in ours.lower(x, w).as_text()
    np.testing.assert_allclose(ours(x, w), lax.dot_general(x, w, numbers), rtol=0, atol=1e-4)
