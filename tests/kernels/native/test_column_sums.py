"""The kernels that sum over rows for each column, and the batch normalizations that call them."""

from __future__ import annotations

import concurrent.futures

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from keras import layers

from rewritten import (
    NEEDS_KERNELS,
    assert_penalty_is_that_of_keras,
    assert_step_close,
    called_kernels,
    differentiate,
    make_step,
    normal,
)
from sizes import cases, mostly_slow, slow
from unisono._src.kernels.before_gradient import rewrite_before_gradient
from unisono._src.kernels.native.column_sums import add_up_gated_columns, find_means, find_variances, scale_columns
from unisono._src.kernels.rewriting import rewrite_function

pytestmark = NEEDS_KERNELS

EPSILON = 1e-3
MOMENTS = ["unisono_measure_columns"]
SUMS = ["unisono_sum_columns"]
GATED = ["unisono_sum_gated_columns"]


def by_keras(x, scale, offset):
    """A batch normalization, with its moments."""
    axes = tuple(range(x.ndim - 1))
    mean, variance = keras.ops.moments(x, axes)
    return keras.ops.batch_normalization(x, mean, variance, -1, offset, scale, EPSILON), mean, variance


def natively(x, scale, offset):
    mean, variance = find_means(x), find_variances(x)
    factor = jax.lax.rsqrt(variance + EPSILON) * scale
    return scale_columns(x, factor, offset - mean * factor), mean, variance


def exactly(x, scale, offset, by_y, by_mean, by_variance):
    """The same in float64, and how large the largest term of each is."""
    x, scale, offset, by_y, by_mean, by_variance = (
        np.asarray(array, "float64") for array in (x, scale, offset, by_y, by_mean, by_variance)
    )
    axes = tuple(range(x.ndim - 1))
    rows = x[..., 0].size
    mean, variance = x.mean(axes), x.var(axes)
    inverse = 1 / np.sqrt(variance + np.float32(EPSILON))
    normal = (x - mean) * inverse
    scaled = by_y * scale
    of_moments = (by_mean + 2 * by_variance * (x - mean)) / rows
    by_x = inverse * (scaled - scaled.mean(axes) - normal * (scaled * normal).mean(axes)) + of_moments
    results = normal * scale + offset, mean, variance, by_x, (by_y * normal).sum(axes), by_y.sum(axes)
    sizes = (
        np.abs(normal * scale) + np.abs(offset),
        np.abs(x).mean(axes),
        variance,
        np.abs(inverse * scaled) + np.abs(of_moments),
        np.abs(by_y * normal).sum(axes),
        np.abs(by_y).sum(axes),
    )
    return zip(results, [size.max() for size in sizes], strict=True)


ARRAYS = ("the result", "the means", "the variances", "the gradient by the array", "by the scale", "by the offset")


def draw_arrays(shape, size=1.0, shift=0.0):
    columns = shape[-1:]
    x = size * (normal(shape) + np.float32(shift))
    vectors = [normal(columns, number) for number in (1, 2)]
    return x.astype("float32"), *vectors, normal(shape, 3), normal(columns, 4), normal(columns, 5)


@settings(max_examples=cases(1, 300))
@given(
    rows=st.sampled_from([(65,), (7, 9, 11), (2047,), (4, 513), (3000,), (20000,)]),
    columns=st.sampled_from([16, 17, 31, 33, 48, 64, 65, 100, 256, 777]),
    size=st.sampled_from([1e-3, 1.0, 1e4]),
    shift=st.sampled_from([0.0, 1.0, 30.0]),
)
@example(rows=(20000,), columns=16, size=1.0, shift=30.0)
def test_errors_against_float64_are_no_larger_than_those_of_xla(rows, columns, size, shift):
    """Badly scaled columns too, whose mean is many deviations from zero. Errors are means over columns: how one is rounded is chance."""
    arrays = draw_arrays((*rows, columns), size, shift)
    ours, theirs = (differentiate(function)(*arrays) for function in (natively, by_keras))
    for what, native, plain, (expected, largest) in zip(ARRAYS, ours, theirs, exactly(*arrays), strict=True):
        errors = [np.abs(np.asarray(found, "float64") - expected).mean() for found in (native, plain)]
        assert errors[0] <= 1.5 * errors[1] + 1e-7 * largest, what


@pytest.mark.parametrize("shape", [(1, 40), (300, 1), (9, 3, 5), (1, 1)])
def test_few_rows_and_columns(shape):
    """Programs leave them to XLA. Of one row, the gradient by the scale is what rounding leaves of two equal sums."""
    arrays = draw_arrays(shape)
    for found, (expected, largest) in zip(differentiate(natively)(*arrays), exactly(*arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * largest + 1e-5)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_what_it_reaches_in_xla(number):
    x, scale, offset, *by_results = draw_arrays((700, 40))
    is_there = np.arange(700)[:, None] == 10 * np.arange(40)
    in_one_column = np.where(is_there & (np.arange(40) == 7), number, x), scale, offset, *by_results
    in_gradients = x, scale, offset, np.where(is_there, number, by_results[0]), *by_results[1:]
    for arrays in (in_one_column, in_gradients):
        for what, native, plain in zip(ARRAYS, *(differentiate(f)(*arrays) for f in (natively, by_keras)), strict=True):
            np.testing.assert_array_equal(np.isfinite(native), np.isfinite(plain), what)


def test_bits_do_not_depend_on_what_else_runs():
    """Alone, and on eight devices at once."""
    arrays = draw_arrays((5000, 48))
    run = differentiate(natively)
    alone = [np.asarray(array) for array in run(*arrays)]
    placed = [jax.device_put(arrays, device) for device in jax.devices("cpu")]
    with concurrent.futures.ThreadPoolExecutor(len(placed)) as pool:
        for _ in range(3):
            for together in pool.map(lambda arrays: [np.asarray(array) for array in run(*arrays)], placed):
                for found, expected in zip(together, alone, strict=True):
                    np.testing.assert_array_equal(found, expected)


LAYERS = {
    "pictures": (layers.BatchNormalization, (8, 8, 32)),
    "no scale": (lambda: layers.BatchNormalization(scale=False), (8, 8, 32)),
    "no offset": (lambda: layers.BatchNormalization(center=False), (200, 32)),
    "neither": (lambda: layers.BatchNormalization(scale=False, center=False), (100, 33)),
    "vectors": (layers.BatchNormalization, (300,)),
    "volumes": (layers.BatchNormalization, (4, 5, 6, 16)),
}
LEFT = {
    "another axis": (lambda: layers.BatchNormalization(axis=1), (32, 64)),
    "few columns": (layers.BatchNormalization, (64, 64, 3)),
    "small": (layers.BatchNormalization, (2, 16)),
    "what is converted": (lambda: layers.BatchNormalization(dtype="mixed_bfloat16"), (8, 8, 32)),
    "groups": (layers.GroupNormalization, (8, 8, 32)),
}


def column_kernels(function, *args):
    return [name for name in called_kernels(function, *args) if name.endswith("_columns")]


@pytest.mark.parametrize("name", mostly_slow(LAYERS, "neither", "volumes"))
def test_a_layer_reads_its_input_once_for_both_moments(name):
    make, row_shape = LAYERS[name]
    ours, plain, args = make_step(make(), row_shape, shift=1, training=True)
    assert column_kernels(ours, *args) == MOMENTS * 2 + SUMS
    compiled = jax.jit(rewrite_function(ours, "cpu")).lower(*args).compile().as_text()
    assert compiled.count('custom_call_target="unisono_measure_columns"') == 1
    assert compiled.count('custom_call_target="unisono_sum_columns"') == 1
    assert_step_close(ours, plain, args)


@jax.custom_jvp
def relu(x):
    """A function with the name and the values of a rectifier, and another gradient: as if there were none."""
    return jnp.maximum(x, 0.0)


relu.defjvps(lambda direction, _, x: direction)

CLIPPED = {
    "relu": keras.ops.relu,
    "relu6": keras.ops.relu6,
    "a layer": layers.ReLU(),
    "a layer with an upper bound": layers.ReLU(6.0),
    "a rectifier that is clipped once more": layers.ReLU(2.0),
}
OTHERS = {
    "another gradient": relu,
    "a slope": layers.ReLU(negative_slope=0.1),
    "a maximum": lambda y: keras.ops.maximum(y, 0.0),
    "silu": keras.ops.silu,
}


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("size", [4.0, *slow(1.0)])
def test_a_rectifier_behind_a_layer_is_part_of_its_sums(name, size):
    """Wide columns too, which the upper bound clips."""
    ours, plain, (weights, x) = make_step(
        layers.BatchNormalization(), (8, 8, 32), shift=1, training=True, activation=CLIPPED[name]
    )
    args = [weight * np.float32(size) for weight in weights], x
    assert column_kernels(ours, *args) == MOMENTS * 2 + GATED
    assert_step_close(ours, plain, args)


@pytest.mark.parametrize("name", mostly_slow(OTHERS, "another gradient", "a slope"))
def test_other_activations_are_left_to_xla(name):
    ours, plain, args = make_step(layers.BatchNormalization(), (8, 8, 32), shift=1, training=True, activation=OTHERS[name])
    assert column_kernels(ours, *args) == MOMENTS * 2 + SUMS
    assert_step_close(ours, plain, args)


def test_a_rectifier_of_a_sum_that_something_else_reads_has_its_gradient():
    ours, plain, args = make_step(
        layers.BatchNormalization(), (8, 8, 32), shift=1, training=True, activation=lambda y: keras.ops.relu(y) + 2 * y
    )
    assert column_kernels(ours, *args) == MOMENTS * 2 + SUMS + GATED
    assert_step_close(ours, plain, args)


@pytest.mark.parametrize("bounds", [(0.0, None), (0.0, 6.0), (-1.0, 0.5)])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_gated_sums_have_what_lies_between_the_bounds(bounds, number):
    """Not what lies at one, and not NaN."""
    low, high = bounds
    x = normal((700, 40)) * 4
    x[:80, :40] = low
    x[100:140, :40] = 3.0 if high is None else high
    x[300, :3], x[301, 5:7] = number, -number
    values, scale, offset = normal((700, 40), 1), np.ones(40, "float32"), np.zeros(40, "float32")
    found = jax.jit(lambda *arrays: add_up_gated_columns(*arrays, low, high))(values, x, scale, offset)
    is_open = (x > low) & (True if high is None else x < high)
    chosen = np.where(is_open, values, 0).astype("float64")
    with np.errstate(invalid="ignore"):
        expected = chosen.sum(0), (chosen * x).sum(0)
    for sums, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(sums, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", LEFT)
def test_other_layers_are_left_to_xla(name):
    make, row_shape = LEFT[name]
    takes = {} if name == "groups" else {"training": True}
    ours, _, args = make_step(make(), row_shape, shift=1, **takes)
    assert column_kernels(ours, *args) == []


def test_a_layer_with_its_moving_moments_has_the_sums_of_its_gradient_alone():
    """As in a net that is tuned, with its statistics left as they are."""
    ours, plain, args = make_step(layers.BatchNormalization(), (8, 8, 32), shift=1, training=False)
    assert column_kernels(ours, *args) == SUMS
    assert_step_close(ours, plain, args)


def column_mean(x):
    return x.mean((0, 1), keepdims=True)


ALMOST = {
    "a mean without a variance": column_mean,
    "a mean of columns": lambda x: x.mean(0, keepdims=True) + (x - 1) ** 2,
    "a mean of rows": lambda x: x.mean((1, 2), keepdims=True),
    "another divisor": lambda x: x.sum((0, 1), keepdims=True) / 7,
    "a matrix of factors": lambda x: x * x[0] + x[1],
    "numbers": lambda x: x[0, 0, 0] * x[0, 0, 1] + x[0, 0, 2],
    "one factor": lambda x: x * x[0, 0, 0] + x[0, 0],
    "factors of rows": lambda x: x * x[..., :1] + x[..., :1],
}


@pytest.mark.parametrize("name", ALMOST)
def test_what_is_almost_a_normalization_is_left_to_xla(name):
    def loss(x):
        return (ALMOST[name](x) ** 2).sum()

    assert column_kernels(lambda x: jax.grad(rewrite_before_gradient(loss))(x), normal((9, 30, 32))) == []


@pytest.mark.parametrize(
    "variance",
    [
        lambda x: x.var((0, 1), keepdims=True, ddof=1),
        lambda x: ((x - column_mean(x)[..., :1]) ** 2).mean((0, 1), keepdims=True),
        *slow(lambda x: column_mean(x * x), lambda x: jnp.abs(x - column_mean(x)).mean((0, 1), keepdims=True)),
    ],
)
def test_other_variances_have_the_gradient_of_what_they_are(variance):
    def gradient(prepare):
        return lambda x: jax.grad(prepare(lambda x: (x * jax.lax.rsqrt(variance(x) + EPSILON) + column_mean(x)).sum() ** 2))(x)

    assert_step_close(gradient(rewrite_before_gradient), gradient(lambda f: f), [normal((9, 30, 32)) + 1], 1e-4)


@pytest.mark.slow
def test_a_gradient_of_a_gradient_is_that_of_keras():
    layer, kernel = layers.BatchNormalization(), "unisono_measure_columns"
    assert_penalty_is_that_of_keras(layer, 100, lambda y: jnp.tanh(y) * normal((100, 32), 3), kernel, training=True)
