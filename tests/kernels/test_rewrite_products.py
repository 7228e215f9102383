"""Rewritten products and sums compute what plain ones do, by divisions that no number of threads decides."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from rewritten import as_it_is, assert_close, assert_same, both, normal, ours, primitives, rewritten_equations, value_and_vjp
from sizes import cases, slow
from unisono._src.engine.xla.determinism import get_compiler_options
from unisono._src.kernels.products.reduction import LEAST, MANY
from unisono._src.kernels.rewriting import rewrite_function

pytestmark = pytest.mark.usefixtures("without_native_kernels")


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
    found = rewritten_equations(product, normal(left), normal(right))
    brought = [eqn.invars[0].aval.shape for eqn in found if eqn.primitive.name == "transpose"]
    assert brought == [(130, 4)] + [(4, 64)] * (left == (130, 64))


def test_a_product_that_no_thread_pool_cuts_stays():
    """A product with a vector, and a tiny one: all others Eigen might cut, also short ones with a large result."""

    def dense(x, w):
        return x @ w

    assert "optimization_barrier" not in primitives(value_and_vjp(dense), normal((3, 5)), normal((3, 7)), normal((7, 5)))
    assert "optimization_barrier" in primitives(value_and_vjp(dense), normal((5, 2137)), normal((5, 483)), normal((483, 2137)))
    assert "optimization_barrier" not in primitives(dense, normal((32, 640)), normal((640,)))


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
    found = rewritten_equations(lambda x: lax.reduce_sum(x, axes), normal(x))
    assert [eqn.invars[0].aval.shape for eqn in found if eqn.primitive.name == "reduce_sum"] == sums


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
    found = ours(lambda x: lax.reduce_sum(x, axes), array)
    np.testing.assert_allclose(found, np.sum(np.asarray(array, "float64"), tuple(axes)), rtol=3e-7)


@pytest.mark.parametrize("fold", ["max", "min"])
@pytest.mark.parametrize(("x", "axes"), [((40, 16, 64), (0, 1)), ((8, 8192), (1,)), ((640, 33), (0,))])
def test_a_largest_and_a_smallest_element_are_the_same(fold, x, axes):
    """To the bit, and what is not a number is not lost, as it is by YNNPACK."""
    array = normal(x)
    array[(1,) * len(x)] = np.nan
    reduce, wanted = {"max": (lax.reduce_max, np.max), "min": (lax.reduce_min, np.min)}[fold]
    assert_same(ours(lambda x: reduce(x, axes), array), wanted(array, axes))
