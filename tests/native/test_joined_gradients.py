"""Gradients that are sums over the same rows are one call of a kernel, and a rectifier's gradient is part of the product before it."""

from __future__ import annotations

import re

import jax
import keras
import numpy as np
import pytest
from jax import lax, nn

from kernel_calls import assert_same_within_rounding, called_kernels, normal
from sizes import slow
from unisono._src.native.library import load_kernels
from unisono._src.xla.rewrite import rewrite_function

pytestmark = pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason))

JOINED = "unisono_multiply_transposed"


def gradients_of(layers, shape):
    """Return a function that returns the gradients by the weights and by the input, and its arguments."""
    model = keras.Sequential([keras.layers.Input(shape[1:]), *layers])
    others = [variable.value for variable in model.non_trainable_variables]
    weights = [normal(variable.shape, place) * 0.1 for place, variable in enumerate(model.trainable_variables)]

    def gradients(weights, x):
        return jax.grad(lambda weights, x: (model.stateless_call(weights, others, x)[0] ** 2).sum(), (0, 1))(weights, x)

    return gradients, weights, normal(shape, 100)


def list_sums(function, *args):
    """Return, for each call of the kernel for gradients, whether it computes a sum too, as JAX writes it."""
    text = jax.jit(rewrite_function(function, "cpu")).lower(*args).as_text()
    return re.findall(rf"@{JOINED}\b.*with_sums = (\w+)", text)


@pytest.mark.parametrize(
    ("layer", "calls"),
    [
        (keras.layers.LSTM(24), 1),
        *slow((keras.layers.SimpleRNN(24), 1)),
        (keras.layers.GRU(24), 2),  # what reaches the two kernels differs
        *slow((keras.layers.Bidirectional(keras.layers.LSTM(24)), 2)),
    ],
    ids=["LSTM", "SimpleRNN", "GRU", "Bidirectional"],
)
def test_the_gradients_of_a_recurrent_layer(layer, calls):
    gradients, weights, x = gradients_of([layer], (16, 10, 12))
    assert list_sums(gradients, weights, x) == ["true"] * calls
    assert_same_within_rounding(gradients, weights, x)


@pytest.mark.parametrize("shape", [(160, 12), (16, 10, 12)])
@pytest.mark.parametrize("use_bias", [False, True])
def test_the_gradients_of_dense_layers(shape, use_bias):
    layers = [keras.layers.Dense(size, activation, use_bias=use_bias) for size, activation in ((24, "tanh"), (20, None))]
    gradients, weights, x = gradients_of(layers, shape)
    assert list_sums(gradients, weights, x) == [str(use_bias).lower()] * 2
    assert_same_within_rounding(gradients, weights, x)


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("columns", [1, 17, *slow(10, 16)])
def test_the_gradients_of_a_layer_with_few_columns(columns, use_bias):
    """As behind a classifier: up to 16, the kernel computes the transposed product. Enough rows that they are cut in parts."""
    gradients, weights, x = gradients_of([keras.layers.Dense(columns, use_bias=use_bias)], (3001, 40))
    assert_same_within_rounding(gradients, weights, x)


def test_the_gradients_of_a_projection_of_an_attention():
    layer = keras.layers.EinsumDense("abc,cde->abde", (None, 2, 12), bias_axes="de")
    gradients, weights, x = gradients_of([layer], (16, 10, 12))
    assert list_sums(gradients, weights, x) == ["true"]
    assert_same_within_rounding(gradients, weights, x)


def test_layers_whose_results_are_added():
    def compute(w, x, y):
        return jax.grad(lambda w: (nn.tanh(x @ w[0] + y @ w[1] + w[2]) ** 2).sum())(w)

    weights = [normal((12, 24)), normal((30, 24), 1), normal((24,), 2)]
    args = weights, normal((160, 12), 3), normal((160, 30), 4)
    assert list_sums(compute, *args) == ["true"]
    assert_same_within_rounding(compute, *args)


def transposed(left, right):
    return lax.dot_general(left, right, (((0,), (0,)), ((), ())))


def test_a_sum_that_is_read_before_the_product():
    def compute(x, right):
        total = right.sum(0)
        return transposed(x * total[0], right), transposed(x, right), total

    args = normal((160, 12)), normal((160, 24), 1)
    assert sorted(list_sums(compute, *args)) == ["false", "true"]
    assert_same_within_rounding(compute, *args)


def test_a_product_with_what_another_one_makes():
    def compute(x, right):
        first = transposed(x, right)
        return first, transposed(x @ first, right)

    args = normal((160, 12)), normal((160, 24), 1)
    assert list_sums(compute, *args) == ["false", "false"]
    assert_same_within_rounding(compute, *args)


def test_the_same_sum_twice():
    def compute(x, right):
        return transposed(x, right), lax.reduce_sum(right, axes=(0,)), lax.reduce_sum(right, axes=(0,)) * 2

    args = normal((160, 12)), normal((160, 24), 1)
    assert list_sums(compute, *args) == ["true"]
    assert_same_within_rounding(compute, *args)


@pytest.mark.parametrize(
    ("shape", "axes", "dtype"),
    [
        ((127, 24), (0,), "float32"),  # few rows
        ((160, 24), (1,), "float32"),
        ((160, 24), (0, 1), "float32"),
        ((16, 10, 24), (0,), "float32"),  # the product is summed over more
        ((160, 24), (0,), "bfloat16"),
    ],
)
def test_other_sums_are_left_to_xla(shape, axes, dtype):
    def compute(x, right):
        summed = tuple(range(right.ndim - 1))
        return lax.dot_general(x, right, ((summed, summed), ((), ()))), lax.reduce_sum(right, axes=axes)

    args = [jax.numpy.asarray(normal((*shape[:-1], size), size), dtype) for size in (12, 24)]
    assert "true" not in list_sums(compute, *args)


class TestRectifiers:
    """Of products that the native kernel computes."""

    rows, depth, columns = 1024, 128, 256

    @pytest.mark.parametrize("shape", [(rows, depth), (32, rows // 32, depth)])
    def test_the_gradient_by_the_operand_of_a_rectifier_is_part_of_the_product(self, shape):
        layers = [keras.layers.Dense(self.columns, "relu"), keras.layers.Dense(self.depth)]
        gradients, weights, x = gradients_of(layers, shape)
        assert called_kernels(gradients, weights, x) == [
            "unisono_multiply",
            "unisono_multiply_gated",
            *[JOINED] * 2,
            *["unisono_multiply_with_bias"] * 2,
        ]
        assert_same_within_rounding(gradients, weights, x)

    @pytest.mark.parametrize("is_transposed", [False, True])
    def test_of_what_is_not_a_number_nothing_is_positive(self, is_transposed):
        x, w, gate = normal((self.rows, self.depth)), normal((self.depth, self.columns), 1), normal((self.rows, self.columns), 2)
        gate[5, 7], gate[6, 8], gate[7, 9] = np.nan, -0.0, np.inf

        def compute(x, w, gate):
            product = lax.dot_general(x, w, (((1,), (1 if is_transposed else 0,)), ((), ())))
            return lax.select(gate > 0, product, lax.full_like(product, 0))

        args = x, w.T if is_transposed else w, gate
        assert called_kernels(compute, *args) == ["unisono_multiply_gated"]
        assert_same_within_rounding(compute, *args)

    @pytest.mark.parametrize("case", ["others", "swapped", "not below", "above one", "read twice", "of a row", "negative zeros"])
    def test_other_selections_are_left_to_xla(self, case):
        def compute(x, w, gate):
            product = x @ w
            zeros = lax.full_like(product, -0.0 if case == "negative zeros" else 0)
            if case == "of a row":
                gate = jax.numpy.broadcast_to(gate[:, :1], gate.shape)
                return lax.select(jax.numpy.broadcast_to(gate[:, :1] > 0, gate.shape), product, zeros)
            is_selected = {"not below": gate >= 0, "above one": gate > 1}.get(case, gate > 0)
            cases = {"others": (product, product * 0 + 1), "swapped": (zeros, product)}.get(case, (product, zeros))
            return lax.select(is_selected, *cases), product if case == "read twice" else zeros

        args = normal((self.rows, self.depth)), normal((self.depth, self.columns), 1), normal((self.rows, self.columns), 2)
        assert called_kernels(compute, *args) == ["unisono_multiply"]
        assert_same_within_rounding(compute, *args)
