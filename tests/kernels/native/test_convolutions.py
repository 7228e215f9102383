"""The native convolutions compute what a direct convolution computes, and the same bits wherever and beside whatever they run."""

from __future__ import annotations

import concurrent.futures
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
from keras import layers

from rewritten import NEEDS_KERNELS, normal
from sizes import cases, slow
from unisono._src.kernels.native.convolutions import call_convolution, call_convolution_with_bias, call_kernel_gradient
from unisono._src.kernels.rewriting import rewrite_function

pytestmark = NEEDS_KERNELS

NUMBERS = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
FEATURES = st.sampled_from([1, 2, 3, 7, 16, 17, 32, 40, 48, 64, 96])


WINOGRAD = {"taps": st.just(3), "strides": st.just(1), "dilation": st.just(1)}


@st.composite
def convolutions(draw):
    """(the shapes of x and w, the window): features, taps and sizes on both sides of every border that the kernels know."""
    kinds = {"taps": st.integers(1, 5), "strides": st.integers(1, 3), "dilation": st.integers(1, 2)}
    if draw(st.booleans()):
        kinds = WINOGRAD

    def pair(numbers):
        return draw(numbers), draw(numbers)

    size = pair(st.integers(1, 14))
    kernel = pair(kinds["taps"])
    window = {
        "window_strides": pair(kinds["strides"]),
        "padding": tuple(zip(pair(st.integers(-1, 3)), pair(st.integers(-1, 3)), strict=True)),
        "rhs_dilation": pair(kinds["dilation"]),
    }
    reach = zip(size, window["padding"], kernel, window["rhs_dilation"], strict=True)
    assume(all(n + low + high >= (k - 1) * gap + 1 and n + min(low, 0) + min(high, 0) > 0 for n, (low, high), k, gap in reach))
    ins, outs = pair(FEATURES)
    return (draw(st.integers(1, 5)), *size, ins), (*kernel, ins, outs), window


def convolve_directly(x, w, window):
    return lax.conv_general_dilated(x, w, **window, dimension_numbers=NUMBERS)


def differentiate_directly(x, gradient, w, window):
    return jax.vjp(lambda w: convolve_directly(x, w, window), w)[1](gradient)[0]


def in_float64(function, *arrays):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, function(*(jnp.asarray(array, "float64") for array in arrays)))


def natively(x, w, window):
    results = jax.eval_shape(functools.partial(convolve_directly, window=window), x, w).shape[1:3]
    return call_convolution(
        x, w, results, window["window_strides"], [low for low, _ in window["padding"]], window["rhs_dilation"]
    )


def natively_reversed(x, w, window):
    """The same with a kernel that is kept in the order in which the convolution has it whose gradient by the input this one is."""
    results = jax.eval_shape(functools.partial(convolve_directly, window=window), x, w).shape[1:3]
    before = [low for low, _ in window["padding"]]
    kept = np.ascontiguousarray(w[::-1, ::-1].swapaxes(2, 3))
    return call_convolution(x, kept, results, window["window_strides"], before, window["rhs_dilation"], is_reversed=True)


def with_bias_natively(x, w, bias, window, is_rectified):
    results = jax.eval_shape(functools.partial(convolve_directly, window=window), x, w).shape[1:3]
    before = [low for low, _ in window["padding"]]
    return call_convolution_with_bias(x, w, bias, results, window["window_strides"], before, window["rhs_dilation"], is_rectified)


def assert_same_with_bias(x, w, window, y):
    """A bias and a rectifier in the kernel give the bits of those that come after it."""
    bias = normal(w.shape[3:], 3)
    np.testing.assert_array_equal(bits(with_bias_natively(x, w, bias, window, False)), bits(y + bias))
    np.testing.assert_array_equal(bits(with_bias_natively(x, w, bias, window, True)), bits(jnp.maximum(y + bias, 0)))


def bits(y):
    """Return the bits of floats; those of all NaNs are the same."""
    y = np.asarray(y)
    return np.where(np.isnan(y), np.float32(np.nan), y).view("int32")


def gradient_natively(x, gradient, taps, window):
    before = [low for low, _ in window["padding"]]
    return call_kernel_gradient(x, gradient, taps, window["window_strides"], before, window["rhs_dilation"])


def assert_close(function, native, *arrays):
    """Within rounding errors of the products: their sum may be near zero."""
    exact = in_float64(function, *arrays)
    terms = in_float64(function, *map(np.abs, arrays))
    np.testing.assert_allclose(native, exact, rtol=0, atol=3e-7 * terms.max(initial=0))


@settings(max_examples=cases(4, 600))
@given(case=convolutions())
def test_convolutions_and_their_gradients(case):
    x_shape, w_shape, window = case
    x, w = normal(x_shape), normal(w_shape, 1)
    y = natively(x, w, window)
    assert_close(functools.partial(convolve_directly, window=window), y, x, w)
    np.testing.assert_array_equal(natively_reversed(x, w, window), y)
    assert_same_with_bias(x, w, window, y)
    gradient = normal(y.shape, 2)
    native = gradient_natively(x, gradient, w_shape[:2], window)
    assert_close(functools.partial(differentiate_directly, window=window), native, x, gradient, w)


@settings(max_examples=cases(3, 250))
@given(case=convolutions(), value=st.sampled_from([np.inf, -np.inf, np.nan, 3e38]), seed=st.integers(0, 1 << 16))
def test_what_is_not_finite_reaches_the_outputs_of_a_direct_convolution(case, value, seed):
    x_shape, w_shape, window = case
    x, w = normal(x_shape), normal(w_shape, 1)
    place = tuple(np.random.default_rng(seed).integers(0, x_shape))
    x[place] = value
    plain = np.asarray(convolve_directly(x, w, window))
    native = np.asarray(natively(x, w, window))
    np.testing.assert_array_equal(np.isfinite(native), np.isfinite(plain))
    np.testing.assert_array_equal(np.asarray(natively_reversed(x, w, window)), native)
    assert_same_with_bias(x, w, window, native)
    gradient = normal(plain.shape, 2)
    plain = np.asarray(differentiate_directly(x, gradient, w, window))
    native = np.asarray(gradient_natively(x, gradient, w_shape[:2], window))
    np.testing.assert_array_equal(np.isfinite(native), np.isfinite(plain))


@pytest.mark.parametrize("scales", [0.0, 3.0])
@pytest.mark.parametrize("features", [32, 128])
def test_errors_are_those_of_a_direct_convolution(features, scales):
    """At most 1.5 times as large in mean, if features differ by orders of magnitude too."""
    window = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), "rhs_dilation": (1, 1)}
    scale = 10 ** np.linspace(-scales, scales, features).astype("float32")
    x, w = normal((8, 16, 16, features)) * scale, normal((3, 3, features, features), 1) / scale[:, None]
    exact = in_float64(functools.partial(convolve_directly, window=window), x, w)
    gradient = normal(exact.shape, 2)
    errors = [np.abs(y - exact).mean() for y in (natively(x, w, window), convolve_directly(x, w, window))]
    assert errors[0] <= 1.5 * errors[1]
    exact = in_float64(functools.partial(differentiate_directly, window=window), x, gradient, w)
    ys = gradient_natively(x, gradient, (3, 3), window), differentiate_directly(x, gradient, w, window)
    errors = [(np.abs(y - exact) / scale[:, None]).mean() for y in ys]
    assert errors[0] <= 1.5 * errors[1]


@functools.partial(jax.jit, static_argnames="times")
def step_of_two_convolutions(x, w, v, times=1):
    """Return the values and gradients of a loop that convolves by Winograd's algorithm and by a product."""

    def loss(w, v, x):
        for kernel in (w, v):
            x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)
        return (x**2).mean()

    def step(carry, _):
        w, v = carry
        value, gradients = jax.value_and_grad(loss, (0, 1))(w, v, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, (w, v), gradients), value

    return lax.scan(step, (w, v), length=times)


def test_bits_do_not_depend_on_what_else_runs():
    """Alone, on eight devices at once, and one row of the batch alone."""
    args = normal((6, 12, 12, 32)), normal((3, 3, 32, 48), 1) / 20, normal((5, 5, 48, 32), 2) / 20
    step = jax.jit(rewrite_function(functools.partial(step_of_two_convolutions, times=3), "cpu"))
    alone = jax.tree.map(np.asarray, step(*args))
    placed = [jax.device_put(args, device) for device in jax.devices("cpu")]
    with concurrent.futures.ThreadPoolExecutor(len(placed)) as pool:
        for _ in range(3):
            for together in pool.map(lambda args: jax.tree.map(np.asarray, step(*args)), placed):
                jax.tree.map(np.testing.assert_array_equal, together, alone)


@pytest.mark.parametrize("kernel", [(3, 3, 32, 32), (5, 5, 7, 9)])
def test_a_row_has_the_same_bits_in_every_batch(kernel):
    window = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), "rhs_dilation": (1, 1)}
    x, w = normal((9, 17, 17, kernel[2])), normal(kernel, 1)
    whole = np.asarray(natively(x, w, window))
    np.testing.assert_array_equal(np.asarray(natively(x[3:5], w, window)), whole[3:5])


class TestEpilogues:
    """A bias and a rectifier are found by what they compute, and only where nothing else reads what they change."""

    x, w, bias = normal((4, 9, 9, 32)), normal((3, 3, 32, 48), 1), normal((48,), 2)

    def convolve(self, x, w, numbers=NUMBERS, **window):
        return lax.conv_general_dilated(
            x, w, **{"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), **window}, dimension_numbers=numbers
        )

    def call(self, function, *args):
        """Return what a program returns, and the kernels that it calls forward."""
        program = jax.jit(rewrite_function(function, "cpu"))
        return program(*args), re.findall(r"@(unisono_convolve\w*)", program.lower(*args).as_text())

    def assert_is_called(self, function, plain, *args, kernels):
        y, called = self.call(function, *args)
        assert called == kernels
        expected, _ = self.call(plain, *args)
        jax.tree.map(lambda one, other: np.testing.assert_array_equal(bits(one), bits(other)), y, expected)

    @pytest.mark.parametrize("rectify", [None, jax.nn.relu, keras.activations.relu, lambda x: jnp.maximum(x, 0)])
    @pytest.mark.parametrize("is_first", [True, False])
    def test_a_bias_is_added_by_the_kernel(self, rectify, is_first):
        def compute(x, w, bias, keep=lambda y: y):
            y = keep(self.convolve(x, w))
            y = y + bias if is_first else bias + y
            return y if rectify is None else rectify(keep(y))

        plain = functools.partial(compute, keep=lax.optimization_barrier)
        self.assert_is_called(compute, plain, self.x, self.w, self.bias, kernels=["unisono_convolve_with_bias"])

    def test_a_gradient_asks_the_rectified_result(self):
        """So that only this one is in memory."""

        def loss(w, bias, x, keep=lambda y: y):
            return (jax.nn.relu(keep(self.convolve(x, w)) + bias) ** 2).sum()

        y, called = self.call(jax.grad(loss), self.w, self.bias, self.x)
        assert called == ["unisono_convolve_with_bias"]
        text = jax.jit(rewrite_function(jax.grad(loss), "cpu")).lower(self.w, self.bias, self.x).as_text()
        assert "stablehlo.maximum" not in text
        expected, _ = self.call(jax.grad(functools.partial(loss, keep=lax.optimization_barrier)), self.w, self.bias, self.x)
        np.testing.assert_array_equal(y, expected)

    def test_layers_in_one_and_two_dimensions_and_both_layouts_have_it(self):
        for layer, shape in (
            (layers.Conv2D(24, 3, activation="relu"), (2, 8, 8, 16)),
            (layers.Conv2D(24, 3, strides=2, activation="relu", data_format="channels_first"), (2, 16, 8, 8)),
            (layers.Conv1D(24, 3, padding="same", activation="relu"), (2, 12, 16)),
        ):
            x = normal(shape)
            layer.build(shape)
            layer.bias.assign(normal((24,), 2))
            y, called = self.call(lambda x, layer=layer: layer(x), x)
            assert called == ["unisono_convolve_with_bias"]
            layer.activation = keras.activations.linear
            linear, _ = self.call(lambda x, layer=layer: lax.optimization_barrier(layer(x)), x)
            np.testing.assert_array_equal(bits(y), bits(jnp.maximum(linear, 0)))

    def test_what_something_else_reads_stays(self):
        def both(x, w, bias):
            y = self.convolve(x, w)
            return y + bias, y.sum()

        def before_rectifier(x, w, bias):
            y = self.convolve(x, w) + bias
            return jnp.maximum(y, 0), y * 2

        assert self.call(both, self.x, self.w, self.bias)[1] == ["unisono_convolve"]
        (rectified, doubled), called = self.call(before_rectifier, self.x, self.w, self.bias)
        assert called == ["unisono_convolve_with_bias"]
        np.testing.assert_array_equal(rectified, np.maximum(doubled / 2, 0))

    @pytest.mark.parametrize(
        "other",
        [
            pytest.param(lambda y: y + normal(y.shape, 5), id="a residual"),
            pytest.param(lambda y: y + normal((9, 1), 5), id="a number for each pixel"),
            pytest.param(lambda y: y + normal((4, 1, 1, 48), 5), id="a number for each row and feature"),
            pytest.param(lambda y: y + 2.0, id="one number"),
            pytest.param(lambda y: jnp.maximum(y, 0), id="no bias"),
        ],
    )
    def test_other_sums_stay(self, other):
        _, called = self.call(lambda x, w: other(self.convolve(x, w)), self.x, self.w)
        assert called == ["unisono_convolve"]

    @pytest.mark.parametrize("bound", [1.0, -0.0])
    def test_a_bound_other_than_zero_stays(self, bound):
        y, called = self.call(lambda *args: lax.max(self.convolve(*args[:2]) + args[2], bound), self.x, self.w, self.bias)
        assert called == ["unisono_convolve_with_bias"]
        np.testing.assert_array_equal(bits(y.min()), bits(np.float32(bound)))

    def test_a_loop_that_takes_a_maximum_and_a_number_that_is_compared_are_no_rectifiers(self):
        def compute(x, w, bias):
            y = self.convolve(x, w) + bias
            _, repeated = lax.scan(lambda carry, _: (carry, jnp.maximum(x, 0)), None, length=3)
            return y, repeated, lax.gt(x, 0.0), lax.gt(jnp.float32(0.5), y)

        y, repeated, is_positive, is_small = self.call(compute, self.x, self.w, self.bias)[0]
        np.testing.assert_array_equal(repeated, np.broadcast_to(np.maximum(self.x, 0), (3, *self.x.shape)))
        np.testing.assert_array_equal(is_positive, self.x > 0)
        np.testing.assert_array_equal(is_small, np.asarray(y) < 0.5)

    def test_a_kernel_that_is_read_reversed_stays_reversed(self):
        """As in the gradient of a convolution by its input."""
        numbers = NUMBERS._replace(rhs_spec=(2, 3, 0, 1))

        def compute(x, w, bias):
            return self.convolve(x, lax.rev(w, (0, 1)), numbers) + bias

        args = normal((4, 9, 9, 48)), self.w, normal((32,), 2)
        assert self.call(compute, *args)[1] == ["unisono_convolve"]
        assert "stablehlo.reverse" not in jax.jit(rewrite_function(compute, "cpu")).lower(*args).as_text()

    @pytest.mark.parametrize(("dtype", "window"), [("float32", {"lhs_dilation": (2, 2)}), ("bfloat16", {})])
    def test_what_is_no_one_call_in_float32_stays(self, dtype, window):
        """A sum in bfloat16 is rounded before the bias is added."""
        args = (jnp.asarray(array, dtype) for array in (self.x, self.w, self.bias))
        _, called = self.call(lambda x, w, bias: self.convolve(x, w, **window) + bias, *args)
        assert set(called) == {"unisono_convolve"}


@pytest.mark.parametrize("space", [(7, 9), *slow(((2, 2),))])
@pytest.mark.parametrize("numbers", [NUMBERS, *slow((("NCHW", "OIHW", "NCHW"),))])
@pytest.mark.parametrize("window", [{"window_strides": (2, 3)}, {"lhs_dilation": (2, 1)}, *slow({}, {"rhs_dilation": (2, 1)})])
def test_gradients_of_programs_are_exact(space, numbers, window):
    """In any layout, for images smaller than the kernel too: the gradient by the kernel is found by its layout, not by its size."""

    def loss(x, w):
        return (jnp.sin(lax.conv_general_dilated(x, w, **convolution, dimension_numbers=numbers))).sum()

    convolution = {"window_strides": (1, 1), "padding": ((1, 2), (2, 1)), **window}
    is_last = numbers == NUMBERS
    x = normal((8, *space, 32) if is_last else (8, 32, *space))
    w = normal((3, 4, 32, 48) if is_last else (48, 32, 3, 4), 1)
    program = jax.jit(rewrite_function(jax.grad(loss, (0, 1)), "cpu"))
    text = program.lower(x, w).as_text()
    assert text.count("@unisono_convolution_kernel_gradient") == 1 + (window.get("lhs_dilation") is not None)
    assert "stablehlo.convolution" not in text
    for native, exact in zip(program(x, w), in_float64(lambda *arrays: jax.grad(loss, (0, 1))(*arrays), x, w), strict=True):
        np.testing.assert_allclose(native, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("preferred", [None, "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_arrays_of_few_bits_are_convolved_in_float32(dtype, preferred):
    """The result is the exact one, rounded once, but for errors of float32."""
    convolve = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=NUMBERS,
        preferred_element_type=preferred,
    )
    x, w = (jnp.asarray(normal(shape, seed), dtype) for seed, shape in enumerate([(3, 9, 9, 32), (3, 3, 32, 48)]))
    program = jax.jit(rewrite_function(convolve, "cpu"))
    assert program.lower(x, w).as_text().count("@unisono_convolve") == 1
    y = program(x, w)
    assert y.dtype == (preferred or dtype)
    exact = in_float64(functools.partial(convolve, preferred_element_type=None), x, w)
    terms = in_float64(functools.partial(convolve, preferred_element_type=None), *(abs(array) for array in (x, w)))
    error = abs(np.asarray(y, "float64") - exact)
    assert (error <= abs(exact) * float(jnp.finfo(y.dtype).eps) / 2 + 3e-7 * terms.max()).all()


def test_an_input_without_features():
    x, w, gradient = normal((2, 5, 5, 0)), normal((3, 3, 0, 4)), normal((2, 3, 3, 4))
    np.testing.assert_array_equal(call_convolution(x, w, (3, 3), (1, 1), (0, 0), (1, 1)), np.zeros((2, 3, 3, 4), "float32"))
    assert call_kernel_gradient(x, gradient, (3, 3), (1, 1), (0, 0), (1, 1)).shape == (3, 3, 0, 4)
