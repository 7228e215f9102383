"""The native products compute what XLA computes, for every order of dimensions that they take, with a bias and a rectifier."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax

from rewritten import NEEDS_KERNELS, assert_same_within_rounding, called_kernels, normal
from sizes import cases, mostly_slow
from unisono._src.kernels.native.products import call_gated_product, call_product, call_product_with_bias, call_transposed_product
from unisono._src.kernels.rewriting import rewrite_function

pytestmark = NEEDS_KERNELS

SIZES = st.sampled_from([1, 2, 3, 7, 12, 13, 31, 33, 48, 49, 65, 100, 255, 257, 300])
HEIGHTS = st.sampled_from([1, 2, 13, 100, 257, 511, 513, 700, 1030])
ROWS = st.sampled_from([1, 2, 5, 47, 96, 255, 256, 257, 500, 1023, 1025, 3000])


@settings(max_examples=cases(10, 600))
@given(rows=ROWS, depth=HEIGHTS, columns=SIZES, others=st.lists(SIZES, max_size=3), with_sums=st.booleans())
@example(rows=1025, depth=1030, columns=257, others=[], with_sums=True)
@example(rows=3000, depth=511, columns=33, others=[7, 600], with_sums=True)
def test_transposed_products(rows, depth, columns, others, with_sums):
    lefts, right = [normal((rows, size), size) for size in (depth, *others)], normal((rows, columns), 1)
    below = call_transposed_product(lefts, right, with_sums)
    left = np.concatenate([*lefts, *[np.ones((rows, 1), "float32")] * with_sums], axis=1)
    exact = left.T.astype("float64") @ right.astype("float64")
    terms = np.abs(left).T @ np.abs(right)
    np.testing.assert_allclose(below, exact, rtol=0, atol=3e-7 * terms.max())


DEPTHS = st.sampled_from([1, 2, 3, 17, 64, 511, 512, 513, 700, 1030])


@settings(max_examples=cases(10, 600))
@given(rows=ROWS, depth=DEPTHS, columns=SIZES, is_transposed=st.booleans())
def test_products(rows, depth, columns, is_transposed):
    left, right = normal((rows, depth)), normal((depth, columns), 1)
    exact = left.astype("float64") @ right.astype("float64")
    terms = np.abs(left) @ np.abs(right)
    y = call_product(left, np.ascontiguousarray(right.T) if is_transposed else right, is_transposed)
    np.testing.assert_allclose(y, exact, rtol=0, atol=5e-7 * terms.max())
    gate = normal((rows, columns), 2)
    gated = call_gated_product(left, np.ascontiguousarray(right.T) if is_transposed else right, gate, is_transposed)
    np.testing.assert_array_equal(gated, np.where(gate > 0, y, 0))
    if not is_transposed:
        check_epilogues(left, right, np.asarray(y))


def check_epilogues(left, right, y):
    """The bits are those of the product, then the sum, then the rectifier."""
    bias = normal(right.shape[1:], 2)
    np.testing.assert_array_equal(call_product_with_bias(left, right, bias, False), y + bias)
    np.testing.assert_array_equal(call_product_with_bias(left, right, bias, True), np.maximum(y + bias, 0))


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_products(rows, depth, columns):
    left, right, bias = normal((rows, depth)), normal((depth, columns)), normal((columns,))
    np.testing.assert_array_equal(call_product(left, right), np.zeros((rows, columns), "float32"))
    np.testing.assert_array_equal(call_product_with_bias(left, right, bias, False), np.zeros((rows, columns), "float32") + bias)
    others = normal((rows, columns))
    product = call_transposed_product([left], others, True)
    sums = np.concatenate([np.zeros((depth, columns), "float32"), others.sum(0, keepdims=True)])
    np.testing.assert_allclose(product, sums, rtol=1e-6)


@pytest.mark.parametrize("is_rectified", [False, True])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(number, is_rectified):
    left, right = normal((130, 600)), np.abs(normal((600, 50), 1)) + 1
    left[77, 550] = number
    y = np.asarray(call_product_with_bias(left, right, normal((50,), 2), is_rectified))
    assert np.isfinite(np.delete(y, 77, axis=0)).all()
    np.testing.assert_array_equal(y[77], np.full(50, 0 if is_rectified and number == -np.inf else number))


@pytest.mark.parametrize("where", ["left", "right"])
def test_what_is_not_finite_stays_in_its_row_or_column(where):
    left, right = normal((700, 50)), normal((700, 33), 1)
    (left if where == "left" else right)[600, 9] = np.nan
    y = np.asarray(call_transposed_product([left], right))
    expected = np.zeros((50, 33), bool)
    expected[9 if where == "left" else slice(None), slice(None) if where == "left" else 9] = True
    np.testing.assert_array_equal(np.isnan(y), expected)


def dense(x, w):
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def multiply(numbers):
    return lambda x, w: lax.dot_general(x, w, (numbers, ((), ())))


def with_bias(x, w, bias):
    return x @ w + bias


def project_with_bias(x, w, bias):
    return jax.numpy.einsum("rd,dhk->rhk", x, w) + bias


def read_twice(x, w, bias):
    y = x @ w
    return y, jax.nn.relu(y + bias)


def sum_over_nothing(x, w, bias):
    """The rewrite looks at a product from the sum, the rectifier and the transpose behind it too."""
    return jax.nn.relu(x @ w + bias), lax.dot_general(x, w.T, (((1,), (1,)), ((), ()))).T


R, D, C = 1024, 128, 128
"""A product with many rows, and a matrix that fits in a cache."""
PRODUCT, WITH_BIAS, TRANSPOSED = ["unisono_multiply"], ["unisono_multiply_with_bias"], ["unisono_multiply_transposed"]
PROGRAMS = {
    "rows and features": (dense, [(R, D), (D, C)], PRODUCT),
    "the projections of an attention": (dense, [(32, R // 32, D), (D, 2, C // 2)], PRODUCT),
    "two dimensions of features": (multiply(((2, 3), (0, 1))), [(32, R // 32, 4, D // 4), (4, D // 4, C)], PRODUCT),
    "the gradient by the input": (multiply(((1,), (1,))), [(R, D), (C, D)], PRODUCT),
    "such a gradient by two dimensions": (multiply(((2, 3), (1, 2))), [(32, R // 32, 4, D // 4), (C, 4, D // 4)], PRODUCT),
    "a transposed product": (lambda x, w: multiply(((1,), (1,)))(x, w).T, [(200, D), (R, D)], PRODUCT),
    "few rows": (dense, [(1023, 64), (64, 128)], []),
    "few elements of a sum": (dense, [(1024, 63), (63, 128)], []),
    "few features": (dense, [(1024, 64), (64, 127)], []),
    "a large matrix": (dense, [(1024, 1025), (1025, 256)], []),
    "a wide matrix": (dense, [(1024, 256), (256, 1025)], []),
    "a sum over nothing of few rows": (sum_over_nothing, [(8, 0), (0, C), (C,)], []),
    "a sum over nothing": (sum_over_nothing, [(R, 0), (0, C), (C,)], []),
    "a bias": (with_bias, [(R, D), (D, C), (C,)], WITH_BIAS),
    "a bias in a row": (with_bias, [(R, D), (D, C), (1, C)], WITH_BIAS),
    "a bias that is broadcast before": (
        lambda x, w, bias: jax.numpy.broadcast_to(bias, (R, C)) + x @ w, [(R, D), (D, C), (C,)], WITH_BIAS,
    ),
    "a bias of one head": (project_with_bias, [(R, D), (D, 2, 64), (64,)], PRODUCT),
    "a number for each head": (project_with_bias, [(R, D), (D, 2, 64), (2, 1)], PRODUCT),
    "a row for all heads": (project_with_bias, [(R, D), (D, 2, 64), (1, 64)], PRODUCT),
    "a number by row": (with_bias, [(R, D), (D, C), (R, 1)], PRODUCT),
    "a number by element": (with_bias, [(R, D), (D, C), (R, C)], PRODUCT),
    "one number": (with_bias, [(R, D), (D, C), (1, 1)], PRODUCT),
    "a scalar": (with_bias, [(R, D), (D, C), ()], PRODUCT),
    "what something else reads too": (read_twice, [(R, D), (D, C), (C,)], PRODUCT),
    "a batch of products": (
        lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((0,), (0,)))), [(4, 240, 30), (4, 240, 32)], [],
    ),
    "contracted in the middle": (multiply(((1,), (0,))), [(24, 140, 30), (140, 32)], []),
    "neither transposed, and small": (dense, [(240, 30), (30, 32)], []),
    "the right one transposed, and small": (multiply(((1,), (1,))), [(240, 30), (32, 30)], []),
    "transposed, of few rows": (multiply(((0,), (0,))), [(100, 30), (100, 32)], []),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_call_these_kernels(name):
    """All others are left to XLA."""
    function, shapes, kernels = PROGRAMS[name]
    args = [normal(shape, seed) for seed, shape in enumerate(shapes)]
    assert called_kernels(function, *args) == kernels
    assert_same_within_rounding(function, *args)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float16")])
def test_other_types_are_left_to_xla(dtypes):
    x, w = (normal(shape, 0, dtype) for shape, dtype in zip(((1024, 64), (64, 128)), dtypes, strict=True))
    assert called_kernels(dense, x, w) == []


@pytest.mark.parametrize("shape", [(160, 24), (20, 8, 24)])
def test_the_gradient_by_a_dense_layers_kernel_is_a_call_without_a_transpose(shape):
    def gradients(x, w):
        y, pull = jax.vjp(dense, x, w)
        return y, *pull(y)

    args = normal(shape), normal((24, 32), 1)
    assert called_kernels(gradients, *args) == TRANSPOSED
    assert "stablehlo.transpose" not in jax.jit(rewrite_function(gradients, "cpu")).lower(*args).as_text()
    assert_same_within_rounding(gradients, *args)


LAYERS = {
    "dense": (lambda: keras.layers.Dense(C, "relu"), (R, D)),
    "dense, of sequences": (lambda: keras.layers.Dense(C, "relu"), (32, R // 32, D)),
    "dense, linear": (lambda: keras.layers.Dense(C), (R, D)),
    "a projection of an attention": (
        lambda: keras.layers.EinsumDense("abc,cde->abde", (None, 2, C // 2), bias_axes="de"), (32, R // 32, D),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", mostly_slow(LAYERS, "dense", "dense, of sequences", "a projection of an attention"))
def test_the_bias_and_the_rectifier_of_a_layer(name):
    make, shape = LAYERS[name]
    layer, x = make(), normal(shape)
    layer.build(shape)
    weights = [normal(variable.shape, number) * 0.1 for number, variable in enumerate(layer.trainable_variables)]

    def apply(weights, x):
        return layer.stateless_call(weights, [], x)[0]

    def gradients(weights, x):
        return jax.grad(lambda weights, x: (apply(weights, x) ** 2).sum(), argnums=(0, 1))(weights, x)

    assert called_kernels(apply, weights, x) == WITH_BIAS
    assert_same_within_rounding(apply, weights, x)
    if name.startswith("dense"):
        assert called_kernels(gradients, weights, x) == PRODUCT + TRANSPOSED + WITH_BIAS
        assert_same_within_rounding(gradients, weights, x)
