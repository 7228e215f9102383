"""The digest of a program is of what its results are computed from, and of nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from unisono._src.program_digest import digest_program


def digest(function: Any, *args: Any) -> int:
    return digest_program(jax.make_jaxpr(function)(*args or (np.ones(4, np.float32),)))


def scaled(factor: Any) -> Any:
    return lambda x: jnp.sin(x) * factor


def looped(factor: Any, steps: int = 3) -> Any:
    return lambda x: lax.scan(lambda carry, _: (carry * factor, carry.sum()), x, None, length=steps)


def chosen(factor: Any) -> Any:
    return lambda x: lax.cond(x[0] > 0, lambda x: x * factor, lambda x: x, x)


@pytest.mark.parametrize(
    "make",
    [scaled, looped, chosen, lambda factor: jax.jit(scaled(factor)), lambda factor: jax.grad(lambda x: scaled(factor)(x).sum())],
)
@pytest.mark.parametrize(
    "kinds",
    [
        (float, float),
        (np.float32, np.float32),
        (partial(np.full, 4), partial(np.full, 4)),
        (partial(jnp.full, 4), partial(jnp.full, 4)),
    ],
)
def test_a_constant_counts_wherever_it_stands(make, kinds):
    one, other = kinds
    assert digest(make(one(2.0))) == digest(make(other(2.0)))
    assert digest(make(one(2.0))) != digest(make(other(2.0000002)))


@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
)
def test_captured_arrays_count_to_the_bit(one, other):
    arrays = np.array(one, np.float32), np.array(other, np.float32)
    same = arrays[0].tobytes() == arrays[1].tobytes()
    digests = [digest(lambda x, array=array: x.sum() + array) for array in arrays]
    assert (digests[0] == digests[1]) == same


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (jnp.cos(x) + 1, x * 2),
        lambda x: (jnp.cos(x) * 1, x + 2),
        lambda x: (x * 2, jnp.cos(x) + 1, x),
        lambda x: (jnp.cos(x) + 1, x * np.float16(2)),
        lambda x: (jnp.cos(x[::-1]) + 1, x + 2),
    ],
)
def test_other_operations_count(other):
    assert digest(other) != digest(lambda x: (jnp.cos(x) + 1, x + 2))


def test_the_number_of_steps_of_a_loop_counts():
    assert digest(looped(2.0, 3)) != digest(looped(2.0, 4))


def test_shapes_and_dtypes_of_inputs_count():
    digests = {digest(lambda x: x + x, np.ones(shape, dtype)) for shape in (3, 4) for dtype in (np.float32, np.int32)}
    assert len(digests) == 4


def test_what_no_result_needs_does_not_count():
    def told(x):
        jax.debug.print("sum {}", jnp.exp(x).sum())
        return jnp.sin(x) * 2.0

    def wasted(x):
        jnp.exp(x)
        return jnp.sin(x) * 2.0

    assert digest(told) == digest(wasted) == digest(scaled(2.0))


def test_the_order_of_equations_that_do_not_depend_on_each_other_does_not_count():
    def backwards(x):
        second = x * 3.0
        return jnp.sin(x), second

    assert digest(backwards) == digest(lambda x: (jnp.sin(x), x * 3.0))
    assert digest(lambda x: x * 2.0 + x * 3.0) != digest(
        lambda x: x * 3.0 + x * 2.0
    )  # which rounds as it does, but may be compiled otherwise


def test_a_function_that_is_called_counts_as_written_out():
    inner = jax.jit(lambda x: x * 2.0)
    again = jax.jit(lambda x: x * 2.0)
    assert (
        digest(lambda x: inner(x) + inner(x + 1))
        == digest(lambda x: inner(x) + again(x + 1))
        == digest(lambda x: x * 2.0 + (x + 1) * 2.0)
    )


def test_keys_count():
    def drawn(seed: int) -> Any:
        key = jax.random.key(seed)
        return lambda x: x + jax.random.normal(key, x.shape)

    assert digest(drawn(0)) == digest(drawn(0)) != digest(drawn(1))
