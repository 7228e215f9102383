"""Gradients that are sums over the same rows are one call of a kernel, and a rectifier's gradient is part of the product before it."""

from __future__ import annotations

import re

import jax
import keras
import numpy as np
import pytest
from jax import lax, nn

from rewritten import NEEDS_KERNELS, assert_same_within_rounding, called_kernels, normal
from sizes import slow
from unisono._src.kernels.rewriting import rewrite_function

pytestmark = NEEDS_KERNELS

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


def transposed(left, right):
    return lax.dot_general(left, right, (((0,), (0,)), ((), ())))


def add_results(x, y, *weights):
    def loss(weights):
        return (nn.tanh(x @ weights[0] + y @ weights[1] + weights[2]) ** 2).sum()

    return jax.grad(loss)(weights)


def read_sum_before(x, right):
    total = right.sum(0)
    return transposed(x * total[0], right), transposed(x, right), total


def multiply_twice(x, right):
    first = transposed(x, right)
    return first, transposed(x @ first, right)


def sum_twice(x, right):
    return transposed(x, right), lax.reduce_sum(right, axes=(0,)), lax.reduce_sum(right, axes=(0,)) * 2


def sum_over(*axes):
    def compute(x, right):
        summed = tuple(range(right.ndim - 1))
        return lax.dot_general(x, right, ((summed, summed), ((), ()))), lax.reduce_sum(right, axes=axes)

    return compute


PROGRAMS = {
    "layers whose results are added": (add_results, [(160, 12), (160, 30), (12, 24), (30, 24), (24,)], ["true"]),
    "a sum that is read before the product": (read_sum_before, [(160, 12), (160, 24)], ["false", "true"]),
    "a product with what another one makes": (multiply_twice, [(160, 12), (160, 24)], ["false", "false"]),
    "the same sum twice": (sum_twice, [(160, 12), (160, 24)], ["true"]),
    "few rows": (sum_over(0), [(127, 12), (127, 24)], []),
    "a sum over features": (sum_over(1), [(160, 12), (160, 24)], ["false"]),
    "a sum over everything": (sum_over(0, 1), [(160, 12), (160, 24)], ["false"]),
    "a product that is summed over more": (sum_over(0), [(16, 10, 12), (16, 10, 24)], ["false"]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_are_part_of_products(name):
    function, shapes, sums = PROGRAMS[name]
    args = [normal(shape, seed) for seed, shape in enumerate(shapes)]
    assert sorted(list_sums(function, *args)) == sums
    assert_same_within_rounding(function, *args)


def test_sums_of_few_bits_are_left_to_xla():
    assert "true" not in list_sums(sum_over(0), *(normal((160, size), size, "bfloat16") for size in (12, 24)))


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
