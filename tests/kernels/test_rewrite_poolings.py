"""Rewritten poolings compute what plain ones do, to the last tie, and hold none of what is slow."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from rewritten import assert_close, assert_same, both, normal, primitives, rewritten_equations, value_and_vjp
from sizes import cases, slow

pytestmark = pytest.mark.usefixtures("without_native_kernels")

SLOW = {"select_and_scatter_add", "reduce_window_max", "reduce_window_min", "reduce_window_sum"}


@st.composite
def poolings(draw):
    """(the shape of x, the windows' size, strides and padding), rows and features included."""
    space = draw(st.sampled_from([1, 2, 2, 3]))
    size = tuple(draw(st.integers(1, 7 if space < 3 else 4)) for _ in range(space))
    window = tuple(draw(st.integers(1, 3)) for _ in range(space))
    strides = tuple(draw(st.one_of(st.just(k), st.integers(1, 4))) for k in window)
    padding = tuple((draw(st.integers(0, k - 1)), draw(st.integers(0, k - 1))) for k in window)
    assume(all(n + low + high >= k for n, k, (low, high) in zip(size, window, padding, strict=True)))
    return (2, *size, 3), (1, *window, 1), (1, *strides, 1), ((0, 0), *padding, (0, 0))


def max_pool(x, window, strides, padding):
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


def min_pool(x, window, strides, padding):
    return lax.reduce_window(x, jnp.inf, lax.min, window, strides, padding)


def sum_pool(x, window, strides, padding):
    return lax.reduce_window(x, 0.0, lax.add, window, strides, padding)


@settings(max_examples=cases(4, 15))
@given(poolings(), st.sampled_from([max_pool, min_pool]), st.booleans(), st.integers(0, 99))
def test_a_largest_element_and_where_its_gradient_goes(case, pool, rare, seed):
    """Exactly, with many ties; also where there are infinities and NaN."""
    shape, *windows = case
    rng = np.random.default_rng(seed)
    values = [-1, 0, 1, *([np.nan, np.inf, -np.inf] if rare else [])]
    x = jnp.asarray(rng.choice(values, shape), "float32")
    layer = functools.partial(pool, window=windows[0], strides=windows[1], padding=windows[2])
    step = value_and_vjp(layer)
    dy = normal(jax.eval_shape(layer, x).shape, seed)
    assert_same(*both(step, dy, x))
    assert not SLOW & set(primitives(step, dy, x))


@settings(max_examples=cases(4, 10))
@given(poolings(), st.integers(0, 99))
def test_a_sum_over_windows_and_its_gradient(case, seed):
    shape, *windows = case
    layer = functools.partial(sum_pool, window=windows[0], strides=windows[1], padding=windows[2])
    x = normal(shape, seed)
    dy = normal(jax.eval_shape(layer, x).shape, seed + 1)
    step = value_and_vjp(layer)
    assert_close(*both(step, dy, x), 1e-6)
    assert not SLOW & set(primitives(step, dy, x))
    names = [eqn.params["name"] for eqn in rewritten_equations(step, dy, x) if eqn.primitive.name == "jit"]
    assert names[0] == "pooling"
    assert names[1:] in ([], ["pooling_gradient"])  # none where XLA's program sums nothing
    assert names[1:] or math.prod(windows[0]) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float16")])
@pytest.mark.parametrize(("size", "stride"), [*slow((2, 2)), (3, 2)])
def test_a_pool_of_few_bits(dtype, size, stride):
    x = jnp.asarray(np.random.default_rng(0).integers(-3, 3, (2, 9, 9, 4)), dtype)
    windows = (1, size, size, 1), (1, stride, stride, 1), "SAME"
    for pool, check in ((max_pool, assert_same), (sum_pool, functools.partial(assert_close, tolerance=0.05))):
        layer = functools.partial(pool, window=windows[0], strides=windows[1], padding=windows[2])
        dy = jnp.asarray(np.random.default_rng(1).integers(-3, 3, jax.eval_shape(layer, x).shape), dtype)
        check(*both(value_and_vjp(layer), dy, x))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        *slow((keras.layers.MaxPooling1D, (9, 3))),
        (keras.layers.MaxPooling2D, (8, 9, 3)),
        *slow((keras.layers.MaxPooling3D, (4, 5, 4, 2))),
        (keras.layers.AveragePooling1D, (9, 3)),
        *slow((keras.layers.AveragePooling2D, (8, 9, 3))),
        *slow((keras.layers.AveragePooling3D, (4, 5, 4, 2))),
    ],
)
@pytest.mark.parametrize(("size", "stride", "padding"), [*slow((2, 2, "valid")), (3, 2, "same")])
def test_a_pooling_layer(layer, shape, size, stride, padding):
    layer, x = layer(size, stride, padding), normal((2, *shape))

    def loss(x):
        return jnp.sum(layer(jax.nn.relu(x)) ** 2)

    step = jax.value_and_grad(loss)
    assert_close(*both(step, x), 1e-6)
    assert not SLOW & set(primitives(step, x))


@pytest.mark.parametrize(
    ("between", "is_kept"),
    [
        (lambda y: jax.nn.relu(y + jnp.ones(8)), False),
        (jnp.tanh, True),
        *slow((lambda y: y, False), (lambda y: jax.nn.relu((y - y.mean(0)) * 2 + jnp.ones(8)), True)),
    ],
    ids=["bias and ReLU", "tanh", "nothing", "normalization"],
)
def test_a_pool_reads_what_is_dear_from_memory(between, is_kept):
    """What a bias and a ReLU make of a convolution is computed again by the pool and by its gradient, on which all agree."""
    p = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    pool = functools.partial(max_pool, window=(1, 2, 2, 1), strides=(1, 2, 2, 1), padding="VALID")

    def pooled(x, w):
        return pool(between(lax.conv_general_dilated(x, w, **p)))

    args = normal((3, 4, 4, 8), 1), normal((3, 8, 8, 4)), normal((3, 3, 4, 8))
    assert_close(*both(value_and_vjp(pooled), *args), 1e-5)
    # The rows are four where one was added so that XLA keeps what it computed.
    found = rewritten_equations(value_and_vjp(pooled), *args)
    lengths = {eqn.outvars[0].aval.shape for eqn in found if eqn.primitive.name == "pad"}
    assert ((4, 8, 8, 8) in lengths) == is_kept


def test_what_has_no_rule_stays():
    integers = functools.partial(lax.reduce_window, init_value=0, computation=lax.add, padding="VALID")
    integers = functools.partial(integers, window_dimensions=(2,), window_strides=(2,))
    assert primitives(integers, jnp.arange(8)) == ["reduce_window_sum"]
    large = functools.partial(max_pool, window=(1, 9, 9, 1), strides=(1, 9, 9, 1), padding="VALID")
    assert primitives(large, normal((1, 9, 9, 1))) == ["reduce_window_max"]
    empty = functools.partial(max_pool, window=(1, 2, 2, 1), strides=(1, 2, 2, 1), padding="VALID")
    assert_same(*both(empty, jnp.zeros((0, 4, 4, 1))))
    assert primitives(empty, jnp.zeros((0, 4, 4, 1))) == ["reduce_window_max"]
