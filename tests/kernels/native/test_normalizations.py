"""The native normalization of rows, and its gradient, compute what XLA computes; and where programs call it."""

from __future__ import annotations

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
from sizes import cases, slow
from unisono._src.kernels.native.normalizations import normalize_rows

pytestmark = NEEDS_KERNELS

EPSILON = 1e-3


def by_keras(x, scale, offset):
    return keras.ops.layer_normalization(x, scale, offset, epsilon=EPSILON)


def natively(x, scale, offset):
    return normalize_rows(x, scale, offset, EPSILON)


def exactly(x, scale, offset, by_y):
    """The same in float64, and how large the largest term of each is."""
    x, scale, offset, by_y = (np.asarray(array, "float64") for array in (x, scale, offset, by_y))
    inverse = 1 / np.sqrt(x.var(-1, keepdims=True) + np.float32(EPSILON))
    normal = (x - x.mean(-1, keepdims=True)) * inverse
    scaled = by_y * scale
    by_x = inverse * (scaled - scaled.mean(-1, keepdims=True) - normal * (scaled * normal).mean(-1, keepdims=True))
    results = normal * scale + offset, by_x, (by_y * normal).sum(0), by_y.sum(0)
    terms = np.abs(normal * scale) + np.abs(offset), np.abs(inverse * scaled), np.abs(by_y * normal).sum(0), np.abs(by_y).sum(0)
    return zip(results, [term.max() for term in terms], strict=True)


WIDTHS = st.sampled_from([16, 17, 31, 33, 48, 63, 64, 65, 100, 127, 129, 256, 300, 777])
ROWS = st.sampled_from([65, 100, 300, 2047, 2048, 2100])
"""Errors are means over rows: how the mean of one row is rounded is chance."""
ARRAYS = ("the rows", "the gradient by the rows", "by the scale", "by the offset")


@settings(max_examples=cases(3, 400))
@given(rows=ROWS, width=WIDTHS, size=st.sampled_from([1e-3, 1.0, 1e4]), shift=st.sampled_from([0.0, 1.0, 30.0]))
@example(rows=2100, width=777, size=1.0, shift=30.0)
def test_errors_against_float64_are_no_larger_than_those_of_xla(rows, width, size, shift):
    """Badly scaled rows too, whose mean is many deviations from zero."""
    x = size * (normal((rows, width)) + np.float32(shift))
    arrays = [x.astype("float32"), normal((width,), 1), normal((width,), 2), normal((rows, width), 3)]
    exact = exactly(*arrays)
    ours, theirs = (differentiate(function)(*arrays) for function in (natively, by_keras))
    for what, native, plain, (expected, term) in zip(ARRAYS, ours, theirs, exact, strict=True):
        errors = [np.abs(np.asarray(found, "float64") - expected).mean() for found in (native, plain)]
        assert errors[0] <= 1.5 * errors[1] + 1e-7 * term, what


@pytest.mark.parametrize("width", [1, 2, 3, 7, 15])
def test_short_rows(width):
    """Programs leave them to XLA."""
    arrays = normal((70, width)), normal((width,), 1), normal((width,), 2), normal((70, width), 3)
    for found, (expected, term) in zip(differentiate(natively)(*arrays), exactly(*arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * term)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_what_it_reaches_in_xla(number):
    x, scale, offset, by_y = normal((70, 40)), normal((40,), 1), normal((40,), 2), normal((70, 40), 3)
    for arrays in (
        (np.where(np.arange(70)[:, None] + np.arange(40) == 50, number, x), by_y),
        (x, np.where(np.arange(40) == 7, number, by_y)),
    ):
        ours, theirs = (differentiate(function)(arrays[0], scale, offset, arrays[1]) for function in (natively, by_keras))
        for what, native, plain in zip(ARRAYS, ours, theirs, strict=True):
            np.testing.assert_array_equal(np.isfinite(native), np.isfinite(plain), what)


def test_rows_do_not_depend_on_their_place():
    x, scale, offset = normal((300, 50)), normal((50,), 1), normal((50,), 2)
    whole = np.asarray(natively(x, scale, offset))
    for rows in (slice(0, 1), slice(77, 300), slice(100, 133)):
        np.testing.assert_array_equal(natively(x[rows], scale, offset), whole[rows])


LAYERS = {
    "scale and offset": (layers.LayerNormalization, (5, 32)),
    "no scale": (lambda: layers.LayerNormalization(scale=False), (5, 32)),
    "no offset": (lambda: layers.LayerNormalization(center=False), (32,)),
    "neither": (lambda: layers.LayerNormalization(scale=False, center=False), (3, 77)),
    "many dimensions": (layers.LayerNormalization, (2, 3, 4, 16)),
    "in bfloat16": (lambda: layers.LayerNormalization(dtype="mixed_bfloat16"), (5, 32)),
}
LEFT = {
    "another axis": (lambda: layers.LayerNormalization(axis=1), (32, 32)),
    "two axes": (lambda: layers.LayerNormalization(axis=[1, 2]), (16, 16)),
    "short rows": (layers.LayerNormalization, (5, 8)),
    "the root of the mean of squares": (layers.RMSNormalization, (5, 32)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_its_gradient_are_two_calls(name):
    make, row_shape = LAYERS[name]
    ours, plain, args = make_step(make(), row_shape)
    assert called_kernels(ours, *args) == ["unisono_normalize_rows", "unisono_normalize_rows_gradient"]
    tolerance = 1e-2 if name == "in bfloat16" else 1e-5
    assert_step_close(ours, plain, args, tolerance)


@pytest.mark.parametrize("name", LEFT)
def test_other_normalizations_are_left_to_xla(name):
    make, row_shape = LEFT[name]
    ours, _, args = make_step(make(), row_shape)
    assert not {"unisono_normalize_rows", "unisono_normalize_rows_gradient"} & {*called_kernels(ours, *args)}


def mean(x):
    return x.mean(-1, keepdims=True)


ALMOST = {
    "the mean of another array": lambda x, z, s: x * s + -mean(z) * s,
    "another factor": lambda x, z, s: x * s + -mean(x) * (s * 2),
    "a mean that is not turned": lambda x, z, s: x * s + mean(x) * s,
    "the largest element": lambda x, z, s: x * s + -x.max(-1, keepdims=True) * s,
    "a matrix as offset": lambda x, z, s: x * s + (-mean(x) * s + z),
}


@pytest.mark.parametrize("name", ALMOST)
def test_what_is_almost_a_normalization_is_left_to_xla(name):
    x, z = normal((6, 32)), normal((6, 32), 1)

    def run(x, z):
        return ALMOST[name](x, z, jax.lax.rsqrt(x.var(-1, keepdims=True) + EPSILON))

    assert called_kernels(run, x, z) == []


@pytest.mark.parametrize(
    "variance",
    [
        lambda x: x.var(-1, keepdims=True, ddof=1),
        lambda x: ((x - 1) ** 2).mean(-1, keepdims=True),
        *slow(lambda x: mean(x * x), lambda x: jnp.abs(x - mean(x)).mean(-1, keepdims=True)),
    ],
)
def test_other_variances_are_left_to_xla(variance):
    def run(x):
        s = jax.lax.rsqrt(variance(x) + EPSILON)
        return x * s + -mean(x) * s

    assert called_kernels(run, normal((6, 32))) == []


def test_a_gradient_of_a_gradient_is_xlas():
    assert_penalty_is_that_of_keras(layers.LayerNormalization(), 6, lambda y: y**3)
