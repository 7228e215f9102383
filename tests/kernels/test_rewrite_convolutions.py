"""Rewritten convolutions compute what plain ones do, channels last, and long ones in pieces."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jax import lax

from rewritten import assert_close, assert_close_sums, both, normal, ours, primitives, rewritten_equations, value_and_vjp
from sizes import cases, slow, tried_on
from unisono._src.kernels.convolution import pieces
from unisono._src.kernels.convolution.kernel import make_channels_last

pytestmark = pytest.mark.usefixtures("without_native_kernels")


@st.composite
def convolutions(draw):
    """(the shapes of x and w, keyword arguments of conv_general_dilated)."""
    space = draw(st.sampled_from([1, 2, 2, 2, 3]))

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(space))

    size, kernel = each(1, 6), each(1, 4)
    p = {"window_strides": each(1, 3), "lhs_dilation": each(1, 3), "rhs_dilation": each(1, 2)}
    p["padding"] = tuple(zip(each(-1, 3), each(-1, 3), strict=True))
    reach = zip(size, p["lhs_dilation"], p["padding"], kernel, p["rhs_dilation"], strict=True)
    assume(all((n - 1) * spread + 1 + low + high >= (k - 1) * gap + 1 for n, spread, (low, high), k, gap in reach))
    groups, ins, outs, rows = (draw(st.integers(1, 3)) for _ in range(4))
    kind = draw(st.sampled_from(["dense", "feature", "batch", "depthwise", "many"]))
    groups = 1 if kind == "dense" else 66 if kind == "many" else groups
    if kind == "depthwise":
        groups, ins = groups * 4, 1
    by_row = kind == "batch"
    p |= {"feature_group_count": 1 if by_row else groups, "batch_group_count": groups if by_row else 1}
    x, w = (rows * (groups if by_row else 1), *size, ins * (1 if by_row else groups)), (*kernel, ins, outs * groups)
    numbers = make_channels_last(space)
    if draw(st.booleans()):
        x, w = (x[0], x[-1], *size), (w[-1], w[-2], *kernel)
        numbers = lax.ConvDimensionNumbers(*[tuple(range(space + 2))] * 3)
    return x, w, p | {"dimension_numbers": numbers}


def dense_case(x, w, stride=1, padding=((1, 1), (1, 1)), **p):
    space = len(x) - 2
    spread = {"window_strides": (stride,) * space, "lhs_dilation": (1,) * space, "rhs_dilation": (1,) * space}
    return x, w, {"padding": padding, "dimension_numbers": make_channels_last(space), **spread, **p}


def list_convolutions(function, *args):
    return [eqn for eqn in rewritten_equations(function, *args) if eqn.primitive.name == "conv_general_dilated"]


CONVOLUTIONS = [
    dense_case((2, 8, 8, 3), (3, 3, 3, 4), 2),
    dense_case((2, 4, 4, 198), (3, 3, 3, 132), feature_group_count=66),
    dense_case((1, 1, 1), (3, 1, 1), 2, ((-1, 3),), lhs_dilation=(2,)),  # in a gradient padding alone is read
]
MORE_CONVOLUTIONS = [
    dense_case((2, 3, 5, 1), (1, 2, 1, 1), 2, ((1, 1), (0, 0)), lhs_dilation=(1, 2)),  # a gradient of two elements that cancel
    dense_case((2, 9, 4, 4, 2), (3, 3, 3, 2, 3), 3, ((0, 0), (1, 1), (1, 1)), rhs_dilation=(2, 1, 1)),
    dense_case((2, 34, 36, 8), (3, 3, 8, 18), padding=((0, 0), (0, 0))),
    dense_case((2, 4, 4, 3), (4, 4, 3, 2), padding=((2, 1), (2, 1))),
    dense_case((2, 5, 5, 2), (2, 2, 2, 3), padding=((2, 2), (2, 2)), lhs_dilation=(3, 3)),
    dense_case((2, 9, 4, 4, 2), (2, 3, 3, 2, 3), 2, ((0, 0), (1, 1), (1, 1)), rhs_dilation=(3, 1, 1)),
    dense_case((1, 5, 5, 2), (3, 3, 2, 3), 2, ((4, 4), (4, 4)), lhs_dilation=(2, 2)),
    dense_case((2, 7, 7, 4), (3, 3, 1, 8), padding=((-1, 0), (0, -2)), feature_group_count=4),
    dense_case((2, 36, 34, 8), (1, 4, 8, 18), 2, padding=((0, 0), (0, 0)), rhs_dilation=(1, 3)),
    dense_case((20, 32, 32, 3), (3, 3, 3, 64)),
    dense_case((16, 24, 32, 3), (2, 3, 3, 80), padding=((0, 0), (0, 0))),
]


@settings(max_examples=cases(2, 20))
@given(convolutions())
@tried_on(*CONVOLUTIONS, *cases([], MORE_CONVOLUTIONS))
def test_a_convolution_and_its_gradients(case):
    compare_with_gradients(*case)


@settings(max_examples=cases(1, 20))
@given(convolutions(), st.integers(0, 1 << 9))
@example(dense_case((7, 8, 8, 3), (3, 3, 3, 4), 2), 2000)  # three rows at a time, of four and of three
def test_a_convolution_in_pieces(case, at_once):
    """Halves beside each other, and few rows of each at a time, as long and large ones are taken."""
    with mock.patch.multiple(pieces, LONG=0, KEPT=0, AT_ONCE=at_once, NEAR=0, FEWEST=2):
        compare_with_gradients(*case)


def compare_with_gradients(x, w, p):
    convolution = functools.partial(lax.conv_general_dilated, **p)
    args = normal(jax.eval_shape(convolution, jnp.zeros(x), jnp.zeros(w)).shape, 2), normal(x), normal(w, 1)
    plain = jax.jit(value_and_vjp(functools.partial(by_definition, **p)))
    assert_close_sums(plain(*args), ours(value_and_vjp(convolution), *args), plain(*map(jnp.abs, args)))


def by_definition(
    x,
    w,
    window_strides,
    padding,
    lhs_dilation,
    rhs_dilation,
    dimension_numbers,
    feature_group_count=1,
    batch_group_count=1,
):
    """`jax.lax.conv_general_dilated` by slices and one product: XLA ends the process over some convolutions whose input is dilated."""
    x, w = lax.transpose(x, dimension_numbers.lhs_spec), lax.transpose(w, dimension_numbers.rhs_spec)
    x = lax.pad(x, 0.0, [(0, 0, 0)] * 2 + [(*edges, gap - 1) for edges, gap in zip(padding, lhs_dilation, strict=True)])
    sizes = zip(x.shape[2:], w.shape[2:], rhs_dilation, window_strides, strict=True)
    reach = [(n - (taps - 1) * gap - 1) // step * step + 1 for n, taps, gap, step in sizes]
    seen = []
    for tap in np.ndindex(*w.shape[2:]):
        first = [at * gap for at, gap in zip(tap, rhs_dilation, strict=True)]
        last = [at + n for at, n in zip(first, reach, strict=True)]
        seen.append(lax.slice(x, (0, 0, *first), (*x.shape[:2], *last), (1, 1, *window_strides)))
    groups, axis = max((feature_group_count, 1), (batch_group_count, 0))
    windows = jnp.stack(jnp.split(jnp.stack(seen), groups, axis + 1))
    kernels = jnp.stack(jnp.split(w.reshape(*w.shape[:2], -1), groups, 0))
    y = jnp.einsum("gtnc...,goct->ngo...", windows, kernels, precision="highest")
    y = y.reshape(y.shape[0], -1, *y.shape[3:])
    return lax.transpose(y, np.argsort(dimension_numbers.out_spec))


@pytest.mark.parametrize("data_format", [*slow("channels_last"), "channels_first"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (keras.layers.Conv1D(4, 3, dilation_rate=2, padding="same"), (9, 3)),
        (keras.layers.Conv2D(4, 3, strides=2, padding="same"), (9, 8, 3)),
        (keras.layers.Conv3D(4, 3, padding="same"), (5, 6, 4, 2)),
        (keras.layers.DepthwiseConv2D(3, strides=2, depth_multiplier=2, padding="same"), (8, 8, 4)),
        (keras.layers.Conv2DTranspose(4, 3, strides=2, padding="same"), (5, 5, 3)),
        *slow(
            (keras.layers.Conv1D(4, 3, strides=2, padding="causal"), (9, 3)),
            (keras.layers.Conv2D(8, 3, groups=2, strides=2, padding="same"), (6, 6, 8)),
            (keras.layers.Conv3D(4, (2, 3, 3), strides=(1, 2, 2)), (5, 6, 6, 2)),
            (keras.layers.SeparableConv2D(4, 3, padding="same"), (8, 8, 4)),
            (keras.layers.Conv1DTranspose(4, 3, strides=2), (5, 3)),
            (keras.layers.Conv2DTranspose(4, (4, 3), strides=(3, 2)), (4, 5, 3)),
            (keras.layers.Conv2DTranspose(4, 3, dilation_rate=2), (4, 5, 3)),
            (keras.layers.Conv3DTranspose(2, 2, strides=2), (3, 3, 3, 2)),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, keras.layers.Layer) else None,
)
def test_a_layer_and_its_gradients(layer, shape, data_format):
    layer = type(layer).from_config(layer.get_config() | {"data_format": data_format})
    if data_format == "channels_first":
        shape = (shape[-1], *shape[:-1])
    layer.build((2, *shape))

    def loss(weights, x):
        return jnp.mean(layer.stateless_call(weights, [], x)[0] ** 2)

    args = [normal(v.shape, i) for i, v in enumerate(layer.trainable_variables)], normal((2, *shape), 9)
    step = jax.value_and_grad(loss, argnums=(0, 1))
    assert_close(*both(step, *args))
    for eqn in list_convolutions(step, *args):
        assert eqn.params["dimension_numbers"] == make_channels_last(len(eqn.params["window_strides"]))
        assert set(eqn.params["lhs_dilation"]) == {1}


def test_a_fast_convolution_stays_as_it_is():
    p = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    convolution = functools.partial(lax.conv_general_dilated, **p)
    args = normal((2, 8, 8, 3)), normal((3, 3, 3, 32))
    assert primitives(convolution, *args) == ["conv_general_dilated"]


@pytest.mark.parametrize(
    ("x", "w", "paddings"),
    [
        ((2, 34, 36, 8), (3, 3, 8, 18), [(0, 0), (0, 1)]),
        ((2, 36, 34, 8), (3, 3, 8, 18), [(0, 1), (0, 0)]),
        ((2, 36, 34, 8), (1, 3, 8, 18), [(0, 0), (0, 1)]),
        ((2, 36, 34, 8), (1, 1, 8, 18), [(0, 0), (0, 0)]),
        ((2, 12, 12, 8), (3, 3, 8, 18), [(0, 0), (0, 0)]),
    ],
)
def test_a_convolution_that_reads_much_is_padded(x, w, paddings):
    p = dense_case(x, w, padding=((0, 0), (0, 0)))[2]
    convolution = functools.partial(lax.conv_general_dilated, **p)
    (found,) = list_convolutions(convolution, normal(x), normal(w))
    assert list(found.params["padding"]) == paddings


@pytest.mark.parametrize(("rows", "sizes"), [(4, [4]), (8, [4, 4]), (18, [2, 4]), (64, [4, 4])])
def test_a_gradient_by_a_kernel_is_taken_in_pieces(rows, sizes):
    """One in a loop, and the last, which may be smaller."""
    x, w, p = dense_case((rows, 32, 32, 3), (3, 3, 3, 64))
    convolution = functools.partial(lax.conv_general_dilated, **p)

    def gradient(w, x, dy):
        return jax.vjp(lambda w: convolution(x, w), w)[1](dy)

    found = list_convolutions(gradient, normal(w), normal(x), normal((rows, 32, 32, 64)))
    features = [eqn.invars[0].aval.shape[-1] for eqn in found]
    assert sorted(n for n in features if n != 3) == sizes  # the forward pass reads three


@pytest.mark.parametrize(
    ("x", "w", "rows"),
    [
        ((128, 32, 32, 64), (3, 3, 64, 64), [64, 64]),  # few features, which one thread would take
        ((127, 16, 16, 64), (3, 3, 64, 128), [63, 64]),  # a small kernel
        ((128, 16, 16, 128), (3, 3, 128, 128), [128]),
        ((16, 16, 16, 64), (3, 3, 64, 64), [16]),  # short
        ((300, 32, 32, 64), (3, 3, 64, 64), [10, 10, 14, 14]),  # each half padded to more than 32 MB: ten times 14 rows, and ten
    ],
)
def test_rows_of_a_large_convolution(x, w, rows):
    """How many rows the convolutions of a rewritten one take."""
    p = dense_case(x, w)[2]
    args = jax.ShapeDtypeStruct(x, "float32"), jax.ShapeDtypeStruct(w, "float32")
    found = list_convolutions(functools.partial(lax.conv_general_dilated, **p), *args)
    assert sorted(eqn.invars[0].aval.shape[0] for eqn in found) == rows


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float16")])
@pytest.mark.parametrize("preferred", [None, *slow("float32")])
@pytest.mark.parametrize("groups", [2, *slow(1, 8)])
def test_a_convolution_of_few_bits(dtype, preferred, groups):
    p = {"window_strides": (2, 2), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    p |= {"feature_group_count": groups, "preferred_element_type": preferred}
    convolution = functools.partial(lax.conv_general_dilated, **p)
    x, w = normal((2, 7, 7, 8), 0, dtype), normal((3, 3, 8 // groups, 8), 1, dtype)
    plain, other = both(convolution, x, w)
    assert_close(plain, other, 1e-5 if preferred else float(jnp.finfo(dtype).eps))
    if preferred is None:  # JAX has no gradients of convolutions with another result type
        dy = normal(plain.shape, 2, dtype)
        assert_close(*both(value_and_vjp(convolution), dy, x, w), 2 * float(jnp.finfo(dtype).eps))
