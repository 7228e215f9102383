"""The native depthwise convolutions compute what a direct convolution computes, in the programs that call them."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from rewritten import NEEDS_KERNELS, normal
from sizes import cases
from unisono._src.kernels.rewriting import rewrite_function

pytestmark = NEEDS_KERNELS

FEATURES = st.sampled_from([2, 3, 7, 16, 17, 33, 64, 65, 80])


@st.composite
def depthwise_convolutions(draw):
    """(shapes of x and w, arguments of `conv_general_dilated`), over one or two dimensions."""
    space = draw(st.sampled_from([1, 2, 2]))

    def tuple_of(numbers):
        return tuple(draw(numbers) for _ in range(space))

    size, kernel = tuple_of(st.integers(1, 12)), tuple_of(st.integers(1, 5))
    spread = tuple_of(st.sampled_from([1, 1, 2, 3]))
    window = {
        "window_strides": tuple_of(st.integers(1, 3)),
        "padding": tuple(zip(tuple_of(st.integers(-1, 3)), tuple_of(st.integers(-1, 3)), strict=True)),
        "lhs_dilation": spread,
        "rhs_dilation": tuple_of(st.integers(1, 2)),
    }
    lengths = [(n - 1) * gap + 1 + low + high for n, gap, (low, high) in zip(size, spread, window["padding"], strict=True)]
    reach = zip(lengths, kernel, window["rhs_dilation"], strict=True)
    assume(all(length >= (taps - 1) * gap + 1 for length, taps, gap in reach))
    assume(all(n + min(low, 0) + min(high, 0) > 0 for n, (low, high) in zip(size, window["padding"], strict=True)))
    groups, (ins, outs) = draw(FEATURES), draw(st.sampled_from([(1, 1), (1, 1), (1, 2), (1, 3), (2, 1), (3, 1)]))
    numbers = ("NWC", "WIO", "NWC") if space == 1 else ("NHWC", "HWIO", "NHWC")
    x, w = (draw(st.integers(1, 5)), *size, groups * ins), (*kernel, ins, groups * outs)
    return x, w, window | {"feature_group_count": groups, "dimension_numbers": numbers}


def differentiate(window, x, w, by_result):
    """Return the convolution and its gradients."""
    return differentiate_function(functools.partial(lax.conv_general_dilated, **window), x, w, by_result)


def differentiate_function(convolve, x, w, by_result):
    y, pull = jax.vjp(convolve, x, w)
    return y, *pull(by_result)


def convolve_by_taps(window, x, w):
    """Return the convolution as a sum over the kernel's positions, where XLA may convolve all features with each other, and zeros."""
    groups, strides, dilation = (window[name] for name in ("feature_group_count", "window_strides", "rhs_dilation"))
    *taps, ins, features = w.shape
    padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((*sides, 0) for sides in window["padding"]), (0, 0, 0)])
    padded = padded.reshape(*padded.shape[:-1], groups, ins, 1)
    results = [
        (n - (k - 1) * gap - 1) // stride + 1
        for n, k, gap, stride in zip(padded.shape[1:], taps, dilation, strides, strict=False)
    ]
    y = 0.0
    for tap in np.ndindex(*taps):
        starts = [t * gap for t, gap in zip(tap, dilation, strict=True)]
        place = tuple(
            slice(start, start + (n - 1) * stride + 1, stride) for start, n, stride in zip(starts, results, strides, strict=True)
        )
        weights = jnp.swapaxes(w[tap].reshape(ins, groups, features // groups), 0, 1)
        y += (padded[(slice(None), *place)] * weights).sum(-2)
    return y.reshape(*y.shape[:-2], features)


def draw_arrays(x, w, window):
    y = jax.eval_shape(functools.partial(lax.conv_general_dilated, **window), jnp.zeros(x), jnp.zeros(w))
    return normal(x), normal(w, 1), normal(y.shape, 2)


def list_calls(function, *args):
    """Return the names of the kernels that the rewritten function calls, and whether convolutions are left to XLA."""
    text = jax.jit(rewrite_function(function, "cpu")).lower(*args).as_text()
    return sorted(re.findall(r"@unisono_(\w+)", text)), "stablehlo.convolution" in text


FORWARD, BACKWARD = "convolve_depthwise", "depthwise_kernel_gradient"


@settings(max_examples=cases(4, 600))
@given(case=depthwise_convolutions())
def test_convolutions_and_their_gradients(case):
    """Within rounding errors of the products: their sum may be near zero."""
    *shapes, window = case
    args = draw_arrays(*shapes, window)
    function = functools.partial(differentiate, window)
    is_spread = set(window["lhs_dilation"]) != {1}
    if not is_spread:
        assert list_calls(function, *args) == ([FORWARD, FORWARD, BACKWARD], False)
    native = jax.jit(rewrite_function(function, "cpu"))(*args)
    with jax.enable_x64(True):
        exact, terms = (function(*(jnp.asarray(kind(arg), "float64") for arg in args)) for kind in (np.asarray, np.abs))
    for a, b, sizes in zip(native, exact, terms, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-7 * np.asarray(sizes).max(initial=0))


@settings(max_examples=cases(2, 250))
@given(case=depthwise_convolutions(), value=st.sampled_from([np.inf, -np.inf, np.nan, 3e38]), seed=st.integers(0, 1 << 16))
def test_what_is_not_finite_reaches_the_outputs_of_a_direct_convolution(case, value, seed):
    *shapes, window = case
    window["lhs_dilation"] = tuple(1 for _ in window["lhs_dilation"])
    lengths = [n + sum(padding) for n, padding in zip(shapes[0][1:-1], window["padding"], strict=True)]
    reach = zip(lengths, shapes[1], window["rhs_dilation"], strict=False)
    assume(all(length >= (taps - 1) * gap + 1 for length, taps, gap in reach))
    x, w, by_result = draw_arrays(*shapes, window)
    x[tuple(np.random.default_rng(seed).integers(0, x.shape))] = value
    by_result[tuple(np.random.default_rng(seed + 1).integers(0, by_result.shape))] = value
    function = functools.partial(differentiate, window)
    native = jax.jit(rewrite_function(function, "cpu"))(x, w, by_result)
    direct = jax.jit(functools.partial(differentiate_function, functools.partial(convolve_by_taps, window)))(x, w, by_result)
    for name, a, b in zip(("result", "by x", "by w"), native, direct, strict=True):
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b), name)


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_errors_are_those_of_a_direct_convolution(scale):
    """At most 1.5 times as large in mean, if features differ by orders of magnitude too."""
    window = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "feature_group_count": 48,
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    }
    scales = 10 ** np.linspace(-scale, scale, 48).astype("float32")
    x, w, by_result = draw_arrays((8, 16, 16, 48), (3, 3, 1, 48), window)
    args = x * scales, w / scales, by_result
    function = functools.partial(differentiate, window)
    native, direct = jax.jit(rewrite_function(function, "cpu"))(*args), jax.jit(function)(*args)
    with jax.enable_x64(True):
        exact = function(*(jnp.asarray(arg, "float64") for arg in args))
    for a, b, c, unit in zip(native, direct, exact, (1, 1 / scales, scales), strict=True):
        error, error_of_xla = (np.abs((np.asarray(value, "float64") - np.asarray(c)) / unit).mean() for value in (a, b))
        assert error <= 1.5 * error_of_xla


LAYERS = {
    "depthwise": lambda: keras.layers.DepthwiseConv2D(3, padding="same", use_bias=False),
    "strided": lambda: keras.layers.DepthwiseConv2D(3, strides=2, padding="same", use_bias=False),
    "dilated": lambda: keras.layers.DepthwiseConv2D(3, dilation_rate=2, use_bias=False),
    "of two kernels": lambda: keras.layers.DepthwiseConv2D(3, depth_multiplier=2, use_bias=False),
    "in one dimension": lambda: keras.layers.DepthwiseConv1D(3, padding="same", use_bias=False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_call_the_kernels(name):
    layer = LAYERS[name]()
    x = normal((4, 12, 24) if "one" in name else (4, 12, 12, 24))
    layer.build(x.shape)
    weights = [layer.kernel.value]

    def step(weights, x):
        return jax.grad(lambda weights, x: (layer.stateless_call(weights, [], x)[0] ** 2).sum(), (0, 1))(weights, x)

    assert list_calls(step, weights, x) == ([FORWARD, FORWARD, BACKWARD], False)


def test_what_has_no_kernel_is_left_to_xla():
    """Other types, three dimensions, groups of several features on both sides, and many kernels for each feature."""
    for shape, kernel, groups, dtype in (
        ((2, 6, 6, 8), (3, 3, 1, 8), 8, "bfloat16"),
        ((2, 6, 6, 6, 8), (3, 3, 3, 1, 8), 8, "float32"),
        ((2, 6, 6, 8), (3, 3, 2, 8), 4, "float32"),
        ((2, 6, 6, 8), (3, 3, 1, 8 * 17), 8, "float32"),
    ):
        letters = "DHW"[5 - len(shape) :]
        numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
        convolve = functools.partial(
            lax.conv_general_dilated,
            window_strides=(1,) * len(letters),
            padding="SAME",
            feature_group_count=groups,
            dimension_numbers=numbers,
        )
        assert list_calls(convolve, jnp.zeros(shape, dtype), jnp.zeros(kernel, dtype))[0] == []


def test_a_row_has_the_same_bits_in_every_batch():
    window = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "feature_group_count": 40,
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    }
    x, w, _ = draw_arrays((9, 17, 17, 40), (3, 3, 1, 40), window)
    convolve = jax.jit(rewrite_function(functools.partial(lax.conv_general_dilated, **window), "cpu"))
    np.testing.assert_array_equal(convolve(x[3:5], w), np.asarray(convolve(x, w))[3:5])
