"""A rewritten program computes what the plain one does, and holds none of what is slow."""

from __future__ import annotations

import functools
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from sizes import cases, mostly_slow, slow, tried_on
from unisono._src.xla.determinism import get_compiler_options
from unisono._src.xla.rewrite import pieces, rewrite_function
from unisono._src.xla.rewrite.equations import NESTED, Rewriter
from unisono._src.xla.rewrite.kernel import make_channels_last
from unisono._src.xla.rewrite.reduction import LEAST, MANY
from unisono._src.xla.rewrite.rules import CPU, find_replacement

pytestmark = pytest.mark.usefixtures("without_native_kernels")

SLOW = {"select_and_scatter_add", "reduce_window_max", "reduce_window_min", "reduce_window_sum"}


def equations(program):
    """All equations of a program, nested ones included."""
    for eqn in program.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: isinstance(v, (Jaxpr, ClosedJaxpr))):
            if isinstance(value, (Jaxpr, ClosedJaxpr)):
                yield from equations(getattr(value, "jaxpr", value))


def primitives(function, *args, platform="cpu"):
    return [eqn.primitive.name for eqn in equations(jax.make_jaxpr(rewrite_function(function, platform))(*args).jaxpr)]


def both(function, *args):
    return jax.jit(function)(*args), ours(function, *args)


def ours(function, *args):
    """What a program of the engine computes."""
    return jax.jit(rewrite_function(function, "cpu"), compiler_options=get_compiler_options("cpu"))(*args)


def assert_close(plain, other, tolerance=1e-5):
    """Within `tolerance` of the largest element, since elements near zero are differences of large ones."""
    assert jax.tree.structure(plain) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        a, b = np.asarray(a, "float32"), np.asarray(b, "float32")
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * max(np.abs(a).max(initial=0), 1e-30))


def as_it_is(traced):
    """A program with the rules for CPU; the same object where none applies."""
    return Rewriter(functools.partial(find_replacement, CPU))(traced)


def assert_same(plain, other):
    jax.tree.map(np.testing.assert_array_equal, plain, other)


def value_and_vjp(function):
    def step(dy, *args):
        y, pull = jax.vjp(function, *args)
        return y, pull(dy(y) if callable(dy) else dy)

    return step


def normal(shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


# Convolutions


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
    return (
        x,
        w,
        {
            "window_strides": (stride,) * space,
            "padding": padding,
            "lhs_dilation": (1,) * space,
            "rhs_dilation": (1,) * space,
            "dimension_numbers": make_channels_last(space),
            **p,
        },
    )


CONVOLUTIONS = [
    dense_case((2, 8, 8, 3), (3, 3, 3, 4), 2),
    dense_case((2, 4, 4, 198), (3, 3, 3, 132), feature_group_count=66),
    dense_case((1, 1, 1), (3, 1, 1), 2, ((-1, 3),), lhs_dilation=(2,)),  # in a gradient padding alone is read
]
MORE_CONVOLUTIONS = [
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
    assert_close(plain(*args), ours(value_and_vjp(convolution), *args))


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
        *slow((keras.layers.Conv1D(4, 3, strides=2, padding="causal"), (9, 3))),
        (keras.layers.Conv1D(4, 3, dilation_rate=2, padding="same"), (9, 3)),
        (keras.layers.Conv2D(4, 3, strides=2, padding="same"), (9, 8, 3)),
        *slow((keras.layers.Conv2D(4, (3, 1), dilation_rate=(2, 1)), (9, 8, 3))),
        *slow((keras.layers.Conv2D(8, 3, groups=4, padding="same"), (6, 6, 8))),
        *slow((keras.layers.Conv2D(8, 3, groups=2, strides=2, padding="same"), (6, 6, 8))),
        (keras.layers.Conv3D(4, 3, padding="same"), (5, 6, 4, 2)),
        *slow((keras.layers.Conv3D(4, (2, 3, 3), strides=(1, 2, 2)), (5, 6, 6, 2))),
        *slow((keras.layers.DepthwiseConv1D(3, padding="same"), (9, 3))),
        (keras.layers.DepthwiseConv2D(3, strides=2, depth_multiplier=2, padding="same"), (8, 8, 4)),
        *slow((keras.layers.SeparableConv1D(4, 3), (9, 3))),
        *slow((keras.layers.SeparableConv2D(4, 3, padding="same"), (8, 8, 4))),
        *slow((keras.layers.Conv1DTranspose(4, 3, strides=2), (5, 3))),
        (keras.layers.Conv2DTranspose(4, 3, strides=2, padding="same"), (5, 5, 3)),
        *slow((keras.layers.Conv2DTranspose(4, (4, 3), strides=(3, 2)), (4, 5, 3))),
        *slow((keras.layers.Conv2DTranspose(4, 3, dilation_rate=2), (4, 5, 3))),
        *slow((keras.layers.Conv3DTranspose(2, 2, strides=2), (3, 3, 3, 2))),
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
    for eqn in equations(jax.make_jaxpr(rewrite_function(step, "cpu"))(*args).jaxpr):
        if eqn.primitive.name == "conv_general_dilated":
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
    program = jax.make_jaxpr(rewrite_function(convolution, "cpu"))(normal(x), normal(w)).jaxpr
    (found,) = [eqn.params["padding"] for eqn in equations(program) if eqn.primitive.name == "conv_general_dilated"]
    assert list(found) == paddings


@pytest.mark.parametrize(("rows", "sizes"), [(4, [4]), (8, [4, 4]), (18, [2, 4]), (64, [4, 4])])
def test_a_gradient_by_a_kernel_is_taken_in_pieces(rows, sizes):
    """One in a loop, and the last, which may be smaller."""
    x, w, p = dense_case((rows, 32, 32, 3), (3, 3, 3, 64))
    convolution = functools.partial(lax.conv_general_dilated, **p)

    def gradient(w, x, dy):
        return jax.vjp(lambda w: convolution(x, w), w)[1](dy)

    program = jax.make_jaxpr(rewrite_function(gradient, "cpu"))(normal(w), normal(x), normal((rows, 32, 32, 64))).jaxpr
    convolutions = [eqn for eqn in equations(program) if eqn.primitive.name == "conv_general_dilated"]
    features = [eqn.invars[0].aval.shape[-1] for eqn in convolutions]
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
    program = jax.make_jaxpr(rewrite_function(functools.partial(lax.conv_general_dilated, **p), "cpu"))(*args).jaxpr
    found = [eqn.invars[0].aval.shape[0] for eqn in equations(program) if eqn.primitive.name == "conv_general_dilated"]
    assert sorted(found) == rows


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


# Products


@st.composite
def products(draw):
    """(the shapes of two arrays, the dimension numbers of their product): long ones, in any order of dimensions."""
    kinds = [
        ("batch", draw(st.integers(1, 3))),
        ("contracted", draw(st.sampled_from([3, 40, 65, 130]))),
        ("free", draw(st.integers(1, 9))),
    ]
    kinds += draw(st.sampled_from([[], [("contracted", 3)], [("free", 2)]]))
    sides = []
    for free in (2, 5):
        sizes = [(kind, n + free if kind == "free" else n, place) for place, (kind, n) in enumerate(kinds)]
        sides.append(draw(st.permutations(sizes)))

    def axes(kind, side):
        places = [place for k, _, place in sides[0] if k == kind]
        return tuple([p for _, _, p in side].index(place) for place in places)

    numbers = tuple(tuple(axes(kind, side) for side in sides) for kind in ("contracted", "batch"))
    return *(tuple(n for _, n, _ in side) for side in sides), numbers


@settings(max_examples=cases(3, 15))
@given(products(), st.sampled_from(["float32", "bfloat16"]), st.sampled_from([None, "float32"]))
def test_a_product_and_its_gradients(case, dtype, preferred):
    """Against float32, since XLA itself cannot compute some products of bfloat16 into float32 (a batch that is not first)."""
    left, right, numbers = case
    product = functools.partial(lax.dot_general, dimension_numbers=numbers)
    preferring = functools.partial(product, preferred_element_type=preferred)
    args = normal(left, 0, dtype), normal(right, 1, dtype)
    dy = normal(jax.eval_shape(preferring, *args).shape, 2, preferred or dtype)
    plain = jax.jit(value_and_vjp(product))(*(a.astype("float32") for a in (dy, *args)))
    other = jax.jit(rewrite_function(value_and_vjp(preferring), "cpu"))(dy, *args)
    types = [preferred or dtype, dtype, dtype]
    plain = jax.tree.map(lambda a, t: a.astype(t), jax.tree.leaves(plain), types)
    assert_close(plain, jax.tree.leaves(other), 1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize(("left", "right"), [((130, 64), (130, 4)), ((130, 4), (130, 64))])
def test_the_smaller_operand_of_a_product_is_brought_into_order(left, right):
    product = functools.partial(lax.dot_general, dimension_numbers=(((0,), (0,)), ((), ())))
    program = jax.make_jaxpr(rewrite_function(product, "cpu"))(normal(left), normal(right)).jaxpr
    brought = [eqn.invars[0].aval.shape for eqn in equations(program) if eqn.primitive.name == "transpose"]
    assert brought == [(130, 4)] + [(4, 64)] * (left == (130, 64))


def test_a_product_that_no_thread_pool_cuts_stays():
    """A product with a vector, and a tiny one: all others Eigen might cut, also short ones with a large result."""

    def dense(x, w):
        return x @ w

    assert "optimization_barrier" not in primitives(value_and_vjp(dense), normal((3, 5)), normal((3, 7)), normal((7, 5)))
    assert "optimization_barrier" in primitives(value_and_vjp(dense), normal((5, 2137)), normal((5, 483)), normal((483, 2137)))
    assert "optimization_barrier" not in primitives(dense, normal((32, 640)), normal((640,)))


# Sums


@settings(max_examples=cases(4, 20))
@given(st.lists(st.sampled_from([1, 2, 7, 31, 64, 260, 1031]), min_size=1, max_size=4), st.data())
def test_a_sum_and_its_gradient(x, data):
    assume(np.prod(x) <= 2**21)
    axes = data.draw(st.sets(st.integers(0, len(x) - 1)))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))

    def total(x):
        return lax.reduce_sum(x, sorted(axes)) if axes else x

    dy = normal(jax.eval_shape(total, jnp.zeros(x, dtype)).shape, 2, dtype)
    args = dy, abs(normal(x, 0, dtype))  # positive, since a sum near zero is a difference of large ones
    if np.prod(x) < LEAST and np.prod([x[axis] for axis in axes]) < MANY:
        traced = jax.make_jaxpr(value_and_vjp(total))(*args)
        assert as_it_is(traced) is traced
    else:  # against float32, since XLA's own sums of bfloat16 are rounded at each addition
        plain = jax.jit(value_and_vjp(total))(*(a.astype("float32") for a in args))
        plain = jax.tree.map(lambda a: a.astype(dtype), plain)
        assert_close(plain, ours(value_and_vjp(total), *args), 1e-5 if dtype == "float32" else 2**-8)


@pytest.mark.parametrize(
    ("x", "axes", "sums"),
    [
        ((128, 128), (0, 1), [(32, 64), (64,)]),  # of 16384 elements
        ((16, 32, 32, 64), (0, 1, 2), [(2, 64)]),
        ((256, 3, 257), (0, 2), [(256, 3, 257), (2, 3)]),  # a prime stays, behind it 256 rows are 16 and then two
        ((6000, 128), (0,), [(75, 80, 128), (80, 128)]),  # no multiple of XLA's window
        ((30, 200), (0, 1), [(75, 80), (80,)]),
        ((30, 8), (0, 1), [(30, 8)]),  # few
        ((30, 400), (1,), [(30, 400)]),  # of neighbours, as in a softmax
    ],
)
def test_a_long_sum_becomes_additions_of_blocks(x, axes, sums):
    program = jax.make_jaxpr(rewrite_function(lambda x: lax.reduce_sum(x, axes), "cpu"))(normal(x)).jaxpr
    assert [eqn.invars[0].aval.shape for eqn in equations(program) if eqn.primitive.name == "reduce_sum"] == sums


@pytest.mark.parametrize("x", [(32, 16, 16, 96), (30, 32, 32, 24), (4096, 256)])
def test_the_operand_of_a_long_sum_is_not_written_to_memory(x):
    """As in a batch normalization, where three sums read what one product wrote. An expression that reads it at more places writes it."""

    def sum_three(x, gradient, scale):
        gradient = jnp.where(x * scale > 0, gradient, 0)
        return [array.sum(range(len(x.shape) - 1)) for array in ((x - scale) ** 2, gradient, gradient * x)]

    args = normal(x), normal(x), normal(x[-1:])
    program = jax.jit(rewrite_function(sum_three, "cpu")).lower(*args).compile(get_compiler_options("cpu"))
    assert program.memory_analysis().temp_size_in_bytes < args[0].nbytes


@pytest.mark.parametrize("x", [(29, 15, 15, 8), (29, 7, 7, 4), (1421,)])
def test_a_sum_over_several_dimensions_is_exact(x):
    """XLA's own are ten times less so: it adds up one element after another."""
    array = abs(normal(x))
    axes = range(max(1, len(x) - 1))
    program = (
        jax.jit(rewrite_function(lambda x: lax.reduce_sum(x, axes), "cpu")).lower(array).compile(get_compiler_options("cpu"))
    )
    np.testing.assert_allclose(program(array), np.sum(np.asarray(array, "float64"), tuple(axes)), rtol=3e-7)


@pytest.mark.parametrize("fold", ["max", "min"])
@pytest.mark.parametrize(("x", "axes"), [((40, 16, 64), (0, 1)), ((8, 8192), (1,)), ((640, 33), (0,))])
def test_a_largest_and_a_smallest_element_are_the_same(fold, x, axes):
    """To the bit, and what is not a number is not lost, as it is by YNNPACK."""
    array = normal(x).at[(1,) * len(x)].set(jnp.nan)
    reduce, wanted = {"max": (lax.reduce_max, np.max), "min": (lax.reduce_min, np.min)}[fold]
    program = jax.jit(rewrite_function(lambda x: reduce(x, axes), "cpu")).lower(array).compile(get_compiler_options("cpu"))
    assert_same(program(array), wanted(np.asarray(array), axes))


# Poolings


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
    traced = jax.make_jaxpr(rewrite_function(step, "cpu"))(dy, x)
    names = [eqn.params["name"] for eqn in equations(traced.jaxpr) if eqn.primitive.name == "jit"]
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
    x, w, p = dense_case((3, 8, 8, 4), (3, 3, 4, 8))
    pool = functools.partial(max_pool, window=(1, 2, 2, 1), strides=(1, 2, 2, 1), padding="VALID")

    def pooled(x, w):
        return pool(between(lax.conv_general_dilated(x, w, **p)))

    args = normal((3, 4, 4, 8), 1), normal(x), normal(w)
    assert_close(*both(value_and_vjp(pooled), *args), 1e-5)
    # The rows are four where one was added so that XLA keeps what it computed.
    program = jax.make_jaxpr(rewrite_function(value_and_vjp(pooled), "cpu"))(*args).jaxpr
    lengths = {eqn.outvars[0].aval.shape for eqn in equations(program) if eqn.primitive.name == "pad"}
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


# Nested programs

halves = functools.partial(max_pool, window=(1, 2, 2, 1), strides=(1, 2, 2, 1), padding="VALID")


@jax.custom_vjp
def by_hand(x, w):
    return loss(x, w)


by_hand.defvjp(lambda x, w: (loss(x, w), (x, w)), lambda saved, g: jax.tree.map(lambda a: a * g, jax.grad(loss, (0, 1))(*saved)))


@jax.custom_jvp
def by_rule(x, w):
    return loss(x, w)


by_rule.defjvp(lambda primals, tangents: jax.jvp(loss, primals, tangents))


def loss(x, w):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.sum(halves(y) ** 2)


def in_scan(x, w):
    return lax.scan(lambda total, part: (total + loss(part, w), loss(part, w)), 0.0, jnp.stack([x, 2 * x]))


def in_branches(x, w):
    which = (x.sum() > 0).astype("int32")
    return sum(lax.switch(i, [lambda x: loss(x, w), lambda x: loss(2 * x, w), jnp.sum], x) for i in (0, 1, which))


FORWARD = {
    "jit": jax.jit(loss),
    "remat": jax.checkpoint(loss),
    "scan": lambda x, w: in_scan(x, w)[0],
    "scan of remat": lambda x, w: lax.scan(lambda t, part: (t + jax.checkpoint(loss)(part, w), None), 0.0, jnp.stack([x, x]))[0],
    "cond": in_branches,
    "custom_vjp": by_hand,
    "custom_jvp": by_rule,
    "map": lambda x, w: lax.map(lambda part: loss(part, w), jnp.stack([x, x])).sum(),
    "vmap": lambda x, w: jax.vmap(loss, (0, None))(jnp.stack([x, x]), w).sum(),
}
IN_LOOPS = {
    "fori_loop": lambda f, x, w: lax.fori_loop(0, 2, lambda i, t: jax.tree.map(jnp.add, t, f(x, w)), (x, w)),
    "while_loop": lambda f, x, w: lax.while_loop(lambda t: jnp.sum(f(*t)[0]) < 0, lambda t: f(*t), (x, w)),
}


@pytest.mark.parametrize("name", ["jit", "scan", *slow(*(name for name in FORWARD if name not in ("jit", "scan")))])
@pytest.mark.parametrize("differentiated", [*slow(False), True])
def test_nested_programs_are_rewritten(name, differentiated):
    args = normal((2, 6, 6, 2)), normal((3, 3, 2, 3), 1)
    function = jax.value_and_grad(FORWARD[name], argnums=(0, 1)) if differentiated else FORWARD[name]
    assert_close(*both(function, *args))
    assert not SLOW & set(primitives(function, *args))


@pytest.mark.parametrize("name", mostly_slow(IN_LOOPS, "while_loop"))
def test_loops_over_gradients_are_rewritten(name):
    args = normal((2, 6, 6, 2)), normal((3, 3, 2, 3), 1)
    function = functools.partial(IN_LOOPS[name], jax.grad(loss, argnums=(0, 1)))
    assert_close(*both(function, *args))
    assert not SLOW & set(primitives(function, *args))


def test_every_nested_program_that_we_know_is_met_in_these_tests():
    args = normal((2, 6, 6, 2)), normal((3, 3, 2, 3), 1)
    met = set()
    for function in [*FORWARD.values(), *(functools.partial(loop, jax.grad(loss, (0, 1))) for loop in IN_LOOPS.values())]:
        met |= {eqn.primitive.name for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr)}
    assert set(NESTED) - met == {"closed_call", "core_call", "eval_jaxpr"}  # JAX itself makes them, seldom


# What stays as it is


def test_a_program_without_such_equations_is_the_same_object():
    @jax.jit
    def step(x):
        return lax.scan(lambda c, _: (jnp.where(c > 0, c, -c) @ c, None), x, None, length=3)[0]

    traced = jax.make_jaxpr(step)(normal((3, 3)))
    assert as_it_is(traced) is traced


def test_signature_name_and_donation_stay():
    def train(state, *, batch):
        return {"loss": loss(batch, state["w"]), "none": None}, (state["w"], 1.0)

    state, batch = {"w": normal((3, 3, 2, 3)), "unused": None}, normal((2, 6, 6, 2))
    compiled = jax.jit(rewrite_function(train, "cpu"), donate_argnums=0)
    plain = jax.tree.map(np.array, train(state, batch=batch))
    assert_same(plain, compiled(state, batch=batch))
    assert state["w"].is_deleted()
    assert "jit_train" in jax.jit(rewrite_function(train, "cpu")).lower({"w": normal((3, 3, 2, 3))}, batch=batch).as_text()


def test_effects_and_names_stay(capsys):
    """Private in JAX: the context, the source and the name of an equation, which are handed to what replaces it."""

    def step(x):
        jax.debug.print("sum {}", x.sum())
        with jax.named_scope("the_pool"):
            return halves(x)

    x = jnp.ones((1, 4, 4, 1))
    compiled = jax.jit(rewrite_function(step, "cpu")).lower(x).compile()
    compiled(x)
    jax.effects_barrier()
    assert "sum 16.0" in capsys.readouterr().out
    assert "the_pool/" in str(compiled.as_text())


def test_one_program_met_twice_is_rewritten_once():
    inner = jax.jit(halves)
    traced = jax.make_jaxpr(rewrite_function(lambda x: (inner(x), inner(2 * x)), "cpu"))(jnp.ones((1, 4, 4, 1)))
    first, second = (eqn.params["jaxpr"] for eqn in traced.jaxpr.eqns if eqn.primitive.name == "jit")
    assert first is second


LITERALS = {
    "reshape": lambda: lax.reshape(1.0, (1,)),
    "transpose": lambda: lax.transpose(lax.reshape(1.0, (1, 1)), (1, 0)),
    "maximum": lambda: lax.max(1.0, 0.0),
    "addition": lambda: lax.add(1.0, 2.0),
    "selection": lambda: lax.select(True, 1.0, 2.0),
    "rectifier": lambda: jax.nn.relu(1.0),
    "call": lambda: jax.jit(lambda x: x + 1)(1.0),
    "loop": lambda: lax.scan(lambda carry, _: (carry + 1, carry), 1.0, length=3)[1],
    "branch": lambda: lax.cond(True, lambda x: x, lambda x: x + 1, 1.0),
}


@pytest.mark.parametrize("name", LITERALS)
def test_equations_of_numbers_that_stand_in_the_program(name):
    """Such an operand is no variable, and has no hash."""

    def compute(x):
        return x * LITERALS[name]()

    traced = jax.make_jaxpr(compute)(1.0)
    assert any(isinstance(atom, Literal) for eqn in traced.eqns[:-1] for atom in eqn.invars)
    for function in (compute, jax.grad(lambda x: compute(x).sum())):
        np.testing.assert_array_equal(jax.jit(rewrite_function(function, "cpu"))(1.0), jax.jit(function)(1.0))


# Other platforms


@pytest.mark.parametrize("platform", ["gpu", *slow("cuda", "rocm")])
def test_on_gpu_only_gradients_of_pools_without_overlap_are_rewritten(platform):
    args = normal((2, 6, 6, 2)), normal((3, 3, 2, 3), 1)
    plain = jax.value_and_grad(loss, argnums=(0, 1))
    before = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(plain)(*args).jaxpr)]
    after = primitives(plain, *args, platform=platform)
    for name in ("conv_general_dilated", "reduce_window_max"):
        assert before.count(name) == after.count(name) > 0
    assert "select_and_scatter_add" in before
    assert "select_and_scatter_add" not in after
    assert_same(jax.jit(plain)(*args), jax.jit(rewrite_function(plain, platform))(*args))
    overlapping = jax.grad(lambda x: max_pool(x, (1, 3, 3, 1), (1, 2, 2, 1), "SAME").sum())
    assert "select_and_scatter_add" in primitives(overlapping, args[0], platform=platform)


def test_other_platforms_are_left_alone():
    args = normal((2, 6, 6, 2)), normal((3, 3, 2, 3), 1)
    step = jax.grad(loss)
    assert primitives(step, *args, platform="tpu") == [e.primitive.name for e in equations(jax.make_jaxpr(step)(*args).jaxpr)]


@pytest.mark.parametrize("form", ["ji,jk->ik", "bij,bjk->bik", *slow("ij,jk->ik", "ij,kj->ik")])
def test_a_transposed_product_is_the_product_of_its_operands_the_other_way_round(form):
    """An operand, which is smaller, is brought into order instead of the result."""
    sizes = {"b": 3, "i": 40, "j": 8, "k": 24}
    args = [normal(tuple(sizes[name] for name in part), seed) for seed, part in enumerate(form.split("->")[0].split(","))]
    function = lambda *args: jnp.swapaxes(jnp.einsum(form, *args), -1, -2)
    assert_close(*both(function, *args))
    assert_close(*both(jax.grad(lambda *args: jnp.cos(function(*args)).sum(), argnums=(0, 1)), *args))
    hlo = (
        jax.jit(rewrite_function(function, "cpu"), compiler_options=get_compiler_options("cpu")).lower(*args).compile().as_text()
    )
    results = function(*args).size
    moved = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]\S* transpose\(", hlo)]
    assert results not in moved
