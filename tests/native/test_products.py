"""The native product of a transposed matrix computes what XLA computes, for every order of dimensions that it takes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from sizes import cases
from unisono._src.native.library import load_kernels
from unisono._src.native.products import call_transposed_product
from unisono._src.xla.rewrite import rewrite_function

pytestmark = pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason))

SIZES = st.sampled_from([1, 2, 3, 7, 12, 13, 31, 33, 48, 49, 65, 100, 255, 257, 300])
ROWS = st.sampled_from([1, 2, 5, 47, 96, 255, 256, 257, 500, 1023, 1025, 3000])


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


@settings(max_examples=cases(60, 600))
@given(rows=ROWS, depth=SIZES, columns=SIZES)
def test_transposed_products(rows, depth, columns):
    left, right = normal((rows, depth)), normal((rows, columns), 1)
    exact = left.T.astype("float64") @ right.astype("float64")
    terms = np.abs(left).T @ np.abs(right)
    np.testing.assert_allclose(call_transposed_product(left, right), exact, rtol=0, atol=3e-7 * terms.max())


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_matrices(rows, depth, columns):
    product = call_transposed_product(normal((rows, depth)), normal((rows, columns)))
    np.testing.assert_array_equal(product, np.zeros((depth, columns), "float32"))


@pytest.mark.parametrize("where", ["left", "right"])
def test_what_is_not_finite_stays_in_its_row_or_column(where):
    left, right = normal((700, 50)), normal((700, 33), 1)
    (left if where == "left" else right)[600, 9] = np.nan
    y = np.asarray(call_transposed_product(left, right))
    expected = np.zeros((50, 33), bool)
    expected[9 if where == "left" else slice(None), slice(None) if where == "left" else 9] = True
    np.testing.assert_array_equal(np.isnan(y), expected)


def dense(x, w):
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


@pytest.mark.parametrize("shape", [(160, 24), (20, 8, 24)])
def test_the_gradient_by_a_dense_layers_kernel_is_a_call_without_a_transpose(shape):
    x, w = normal(shape), normal((24, 32), 1)

    def gradients(x, w):
        y, pull = jax.vjp(dense, x, w)
        return y, *pull(y)

    ours = jax.jit(rewrite_function(gradients, "cpu"))
    text = ours.lower(x, w).as_text()
    assert text.count("@unisono_multiply_transposed") == 1
    assert "stablehlo.transpose" not in text
    for native, plain in zip(ours(x, w), jax.jit(gradients)(x, w), strict=True):
        np.testing.assert_allclose(native, plain, rtol=0, atol=1e-5 * np.abs(plain).max())


@pytest.mark.parametrize(
    ("shapes", "numbers"),
    [
        (((4, 240, 30), (4, 240, 32)), (((1,), (1,)), ((0,), (0,)))),  # a batch of products
        (((24, 140, 30), (140, 32)), (((1,), (0,)), ((), ()))),  # contracted in the middle
        (((240, 30), (30, 32)), (((1,), (0,)), ((), ()))),  # neither transposed
        (((240, 30), (32, 30)), (((1,), (1,)), ((), ()))),  # the right one transposed
        (((100, 30), (100, 32)), (((0,), (0,)), ((), ()))),  # of few rows
    ],
)
def test_other_products_are_left_to_xla(shapes, numbers):
    x, w = map(normal, shapes)
    ours = jax.jit(rewrite_function(lambda x, w: lax.dot_general(x, w, numbers), "cpu"))
    assert "@unisono_multiply" not in ours.lower(x, w).as_text()
    np.testing.assert_allclose(ours(x, w), lax.dot_general(x, w, numbers), rtol=0, atol=1e-4)
