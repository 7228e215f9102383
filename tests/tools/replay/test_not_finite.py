"""The first value that is not finite is found where it is made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sizes import cases
from unisono._src.tools.replay.not_finite import INFINITY, NAN, find_not_finite


def share(weights, x):
    """A softmax that overflows, a mask of infinities that is taken out again, a loop."""
    hidden = jnp.tanh(x @ weights)
    grown = jnp.exp(hidden * 1000)
    parts = (grown / grown.sum(-1, keepdims=True)).sum(-1)
    masked = jnp.where(parts > 2, -jnp.inf, 0.0)
    best = jnp.exp(jnp.where(parts < 0, masked, -jnp.inf)).sum()
    total, _ = jax.lax.scan(lambda carry, part: (carry + part, None), best, parts)
    return total


def find(x, weights=None):
    found = find_not_finite(jax.value_and_grad(share), (np.ones((3, 2), "float32") if weights is None else weights, x))
    return [(each.kind, each.equation and each.equation.primitive.name, each.argument, each.place) for each in found]


def test_what_leads_to_no_result_is_left_out():
    assert find(np.zeros((4, 3), "float32")) == []


def test_an_infinity_comes_before_the_nan_that_it_becomes():
    x = np.zeros((4, 3), "float32")
    x[2] = 1
    assert find(x) == [(INFINITY, "exp", None, (2, 0)), (NAN, "div", None, (2, 0))]


def test_an_infinity_may_stay_one():
    found = find_not_finite(lambda x: (jnp.exp(x), jnp.log(x)), (np.array([1, 2, 1000], "float32"),))
    assert [(each.kind, each.equation.primitive.name, each.place) for each in found] == [(INFINITY, "exp", (2,))]


@settings(max_examples=cases(4, 100), deadline=None)
@given(st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_an_argument_is_named_with_the_place(row, column, is_nan):
    x = np.zeros((4, 3), "float32")
    x[row, column] = np.nan if is_nan else -np.inf
    found = find(x)
    assert found[0] == (NAN if is_nan else INFINITY, None, 1, (row, column)) or not is_nan
    weights = np.ones((3, 2), "float32")
    weights[1, 1] = np.nan
    assert find(np.zeros((4, 3), "float32"), weights) == [(NAN, None, 0, (1, 1))]


def test_other_dtypes_and_random_keys_are_let_pass():
    def draw(key, counts, x):
        return (jax.random.normal(key, (2,)) + counts.sum()).astype("bfloat16") / x

    args = jax.random.key(0), np.arange(3), jnp.zeros(2, "bfloat16")
    (found,) = find_not_finite(draw, args)
    assert (found.kind, found.equation.primitive.name, found.shape) == (INFINITY, "div", (2,))
