"""The native products compute what XLA computes, for every order of dimensions that they take, with a bias and a rectifier."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax

from kernel_calls import assert_same_within_rounding, called_kernels, normal
from sizes import cases, slow
from unisono._src.native.library import load_kernels
from unisono._src.native.products import call_gated_product, call_product, call_product_with_bias, call_transposed_product
from unisono._src.xla.rewrite import rewrite_function

pytestmark = pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason))

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


@pytest.mark.parametrize("is_rectified", [False, True])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(number, is_rectified):
    left, right = normal((130, 600)), np.abs(normal((600, 50), 1)) + 1
    left[77, 550] = number
    y = np.asarray(call_product_with_bias(left, right, normal((50,), 2), is_rectified))
    assert np.isfinite(np.delete(y, 77, axis=0)).all()
    np.testing.assert_array_equal(y[77], np.full(50, 0 if is_rectified and number == -np.inf else number))


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_matrices(rows, depth, columns):
    product = call_transposed_product([normal((rows, depth))], normal((rows, columns)), True)
    sums = normal((rows, columns)).sum(0, keepdims=True)
    np.testing.assert_allclose(product, np.concatenate([np.zeros((depth, columns), "float32"), sums]), rtol=1e-6)


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


class TestLargeProducts:
    """A product with many rows, and a matrix that fits in a cache."""

    rows, depth, columns = 1024, 128, 128

    @pytest.mark.parametrize(
        ("shapes", "contracted"),
        [
            (((rows, depth), (depth, columns)), ((1,), (0,))),
            (((32, rows // 32, depth), (depth, 2, columns // 2)), ((2,), (0,))),  # the projections of an attention
            (((32, rows // 32, 4, depth // 4), (4, depth // 4, columns)), ((2, 3), (0, 1))),
            (((rows, depth), (columns, depth)), ((1,), (1,))),  # the gradient by the input
            (((32, rows // 32, 4, depth // 4), (columns, 4, depth // 4)), ((2, 3), (1, 2))),
        ],
    )
    def test_one_call_of_the_kernel(self, shapes, contracted):
        x, w = map(normal, shapes)

        def product(x, w):
            return lax.dot_general(x, w, (contracted, ((), ())))

        assert called_kernels(product, x, w) == ["unisono_multiply"]
        assert_same_within_rounding(product, x, w)

    @pytest.mark.parametrize(
        ("rows", "depth", "columns"), [(1023, 64, 128), (1024, 63, 128), (1024, 64, 127), (1024, 1025, 256), (1024, 256, 1025)]
    )
    def test_others_are_left_to_xla(self, rows, depth, columns):
        assert called_kernels(dense, normal((rows, depth)), normal((depth, columns))) == []

    @pytest.mark.parametrize("rows", [8, 1024])
    def test_sums_over_nothing(self, rows):
        """The rewrite looks at a product from the sum, the rectifier and the transpose behind it too."""
        x, w, bias = normal((rows, 0)), normal((0, self.columns)), normal((self.columns,))

        def compute(x, w, bias):
            return jax.nn.relu(x @ w + bias), lax.dot_general(x, w.T, (((1,), (1,)), ((), ()))).T

        assert called_kernels(compute, x, w, bias) == []
        assert_same_within_rounding(compute, x, w, bias)

    @pytest.mark.parametrize("shape", [(1, columns), (rows, columns), (columns,)], ids=["a row", "broadcast before", "alone"])
    def test_forms_of_a_bias(self, shape):
        x, w, bias = normal((self.rows, self.depth)), normal((self.depth, self.columns), 1), normal(shape[-1:], 2)

        def compute(x, w, bias):
            return jax.numpy.broadcast_to(bias, shape) + x @ w

        assert called_kernels(compute, x, w, bias) == ["unisono_multiply_with_bias"]
        assert_same_within_rounding(compute, x, w, bias)

    @pytest.mark.parametrize("shape", [(64,), (2, 1), (1, 64)])
    def test_a_bias_of_some_of_a_projections_features_is_added_by_xla(self, shape):
        x, w, bias = normal((self.rows, self.depth)), normal((self.depth, 2, 64), 1), normal(shape, 2)

        def compute(x, w, bias):
            return jax.numpy.einsum("rd,dhk->rhk", x, w) + bias

        assert called_kernels(compute, x, w, bias) == ["unisono_multiply"]
        assert_same_within_rounding(compute, x, w, bias)

    def test_a_transposed_product(self):
        x, w = normal((200, self.depth)), normal((self.rows, self.depth), 1)

        def compute(x, w):
            return lax.dot_general(x, w, (((1,), (1,)), ((), ()))).T

        assert called_kernels(compute, x, w) == ["unisono_multiply"]
        assert_same_within_rounding(compute, x, w)

    @pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float16")])
    def test_other_types_are_left_to_xla(self, dtypes):
        x, w = (jax.numpy.asarray(normal(shape), dtype) for shape, dtype in zip(((1024, 64), (64, 128)), dtypes, strict=True))
        assert called_kernels(dense, x, w) == []

    @pytest.mark.parametrize("activation", ["relu", *slow(None)])
    @pytest.mark.parametrize("shape", [(rows, depth), (32, rows // 32, depth)])
    def test_the_bias_and_the_rectifier_of_a_dense_layer(self, shape, activation):
        layer = keras.layers.Dense(self.columns, activation)
        x = normal(shape)
        layer.build(shape)
        kernel, _ = (variable.value for variable in layer.trainable_variables)

        def apply(weights, x):
            return layer.stateless_call(weights, [], x)[0]

        weights = [kernel, normal((self.columns,), 1)]
        assert called_kernels(apply, weights, x) == ["unisono_multiply_with_bias"]
        assert_same_within_rounding(apply, weights, x)

        def gradients(weights, x):
            return jax.grad(lambda weights, x: (apply(weights, x) ** 2).sum(), argnums=(0, 1))(weights, x)

        assert called_kernels(gradients, weights, x) == [
            "unisono_multiply",
            "unisono_multiply_transposed",
            "unisono_multiply_with_bias",
        ]
        assert_same_within_rounding(gradients, weights, x)

    def test_the_bias_of_a_projection_of_an_attention(self):
        layer = keras.layers.EinsumDense("abc,cde->abde", (None, 2, self.columns // 2), bias_axes="de")
        x = normal((32, self.rows // 32, self.depth))
        layer.build(x.shape)
        weights = [normal(variable.shape, 1) for variable in layer.trainable_variables]

        def apply(weights, x):
            return layer.stateless_call(weights, [], x)[0]

        assert called_kernels(apply, weights, x) == ["unisono_multiply_with_bias"]
        assert_same_within_rounding(apply, weights, x)

    @pytest.mark.parametrize(
        "added", [(rows, 1), (rows, columns), (1, 1), ()], ids=["by row", "by element", "one number", "a scalar"]
    )
    def test_what_is_not_a_bias_is_added_by_xla(self, added):
        x, w = normal((self.rows, self.depth)), normal((self.depth, self.columns), 1)

        def compute(x, w, added):
            return jax.nn.relu(x @ w + added)

        assert called_kernels(compute, x, w, normal(added, 2)) == ["unisono_multiply"]
        assert_same_within_rounding(compute, x, w, normal(added, 2))

    def test_a_product_that_something_else_reads_too(self):
        x, w, bias = normal((self.rows, self.depth)), normal((self.depth, self.columns), 1), normal((self.columns,), 2)

        def compute(x, w, bias):
            y = x @ w
            return y, jax.nn.relu(y + bias)

        assert called_kernels(compute, x, w, bias) == ["unisono_multiply"]
        assert_same_within_rounding(compute, x, w, bias)


@pytest.mark.parametrize(
    ("shapes", "numbers"),
    [
        (((4, 240, 30), (4, 240, 32)), (((1,), (1,)), ((0,), (0,)))),  # a batch of products
        (((24, 140, 30), (140, 32)), (((1,), (0,)), ((), ()))),  # contracted in the middle
        (((240, 30), (30, 32)), (((1,), (0,)), ((), ()))),  # neither transposed, and small
        (((240, 30), (32, 30)), (((1,), (1,)), ((), ()))),  # the right one transposed, and small
        (((100, 30), (100, 32)), (((0,), (0,)), ((), ()))),  # of few rows
    ],
)
def test_other_products_are_left_to_xla(shapes, numbers):
    x, w = map(normal, shapes)
    ours = jax.jit(rewrite_function(lambda x, w: lax.dot_general(x, w, numbers), "cpu"))
    assert "@unisono_multiply" not in ours.lower(x, w).as_text()
    np.testing.assert_allclose(ours(x, w), lax.dot_general(x, w, numbers), rtol=0, atol=1e-4)
