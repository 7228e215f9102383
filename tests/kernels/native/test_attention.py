"""Attention runs in the native kernel, and returns what XLA's products and softmax return; other products stay."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import rewritten
from rewritten import NEEDS_KERNELS, normal
from sizes import cases, mostly_slow, slow
from unisono._src.kernels.before_gradient import rewrite_before_gradient
from unisono._src.kernels.rewriting import rewrite_function

pytestmark = NEEDS_KERNELS

BATCH, QUERIES, KEYS, FEATURES = 3, 33, 50, 24


def truths(shape, seed=0, fraction=0.7):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < fraction)


def cosines(y):
    """Return a number for each element, by which a result counts."""
    return jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))


def pull(function, x, by_result):
    """Return the gradient by x."""
    return jax.vjp(function, x)[1](by_result)[0]


def differentiate(function, wrap=lambda function: function):
    """Return a function that returns the result and the gradients of all arguments, of a sum in which each element counts otherwise."""

    def step(*args):
        def loss(*args):
            y = function(*args)
            return (y * cosines(y)).sum(), y

        return jax.grad(wrap(loss), tuple(range(len(args))), has_aux=True)(*args)

    return step


def rewrite(function):
    """Return the function with its gradients as the engine's programs compute them."""
    return rewrite_function(differentiate(function, rewrite_before_gradient), "cpu")


def count_calls(function, *args):
    """Return how many attentions the kernel computes, and how many gradients of them."""
    program = str(jax.make_jaxpr(rewrite(function))(*args))
    gradients = program.count("target_name=unisono_attend_gradient")
    return program.count("target_name=unisono_attend") - gradients, gradients


def assert_close(ours, plain, tolerance=4e-6):
    rewritten.assert_close(plain, ours, tolerance)


def attend(q, k, v, scale=1.0, bias=0.0, mask=True, fill=-1e30):
    """Attention as it is written by hand: (rows, heads, length, features)."""
    scores = q @ k.swapaxes(-1, -2) * scale + bias
    return jax.nn.softmax(jnp.where(mask, scores, fill), -1) @ v


def split_heads(x, heads):
    return x.reshape(*x.shape[:-1], heads, -1)


X = (BATCH, QUERIES, FEATURES)
MASK = truths((BATCH, 1, QUERIES))


def layer(made, *args, **kwargs):
    made.build(X, X)

    def call(x):
        scope = keras.StatelessScope([(variable, variable.value) for variable in made.variables])
        with scope:
            return made(x, x, *args, **kwargs)

    return call


def through_heads(x, **kwargs):
    q = split_heads(x, 6)
    return jax.nn.dot_product_attention(q, q[:, :, :2], q[:, :, 2:4], **kwargs)


def by_hand(x, **kwargs):
    return attend(*(split_heads(x, 6)[..., i : i + 2, :].swapaxes(1, 2) for i in (0, 2, 4)), **kwargs)


def run_twice(x):
    return lax.scan(lambda x, _: (jax.checkpoint(lambda x: attend(x, x, x))(x), None), x, None, length=2)[0]


CAUSAL = jnp.tril(jnp.ones((QUERIES, QUERIES), bool))
DROPPED = truths((BATCH, 2, QUERIES, QUERIES), 2, 0.9)
HEADS = keras.layers.MultiHeadAttention

ATTENTIONS = {
    "heads": lambda: layer(HEADS(2, 8)),
    "heads with a mask": lambda: layer(HEADS(2, 8), attention_mask=MASK),
    "causal heads": lambda: layer(HEADS(2, 8), use_causal_mask=True),
    "causal heads with a mask": lambda: layer(HEADS(3, 7), use_causal_mask=True, attention_mask=MASK),
    "heads with dropout": lambda: layer(HEADS(2, 8, dropout=0.3), attention_mask=MASK, training=True),
    "heads that may drop": lambda: layer(HEADS(2, 8, value_dim=5, dropout=0.3), attention_mask=MASK, training=False),
    "shared keys": lambda: layer(keras.layers.GroupQueryAttention(8, 4, 2), attention_mask=MASK),
    "jax.nn": lambda: through_heads,
    "jax.nn, causal": lambda: lambda x: through_heads(x, is_causal=True),
    "jax.nn with a bias": lambda: lambda x: through_heads(x, bias=normal((1, 6, QUERIES, QUERIES), 1)),
    "by hand": lambda: by_hand,
    "scaled by hand": lambda: lambda x: by_hand(x, scale=0.3, bias=normal((2, 1, QUERIES), 1), mask=MASK[:, :, None]),
    "masked twice": lambda: lambda x: by_hand(x, mask=MASK[:, None] & CAUSAL),
    "masked three times": lambda: lambda x: by_hand(x, mask=MASK[:, None] & CAUSAL & truths((2, 1, 1), 3)),
    "a mask of what is left out": lambda: lambda x: by_hand(x, mask=~(~MASK[:, None] | ~CAUSAL)),
    "without a fill": lambda: lambda x: by_hand(x, bias=jnp.where(MASK[:, None], 0, -1e9)),
    "divided by the root": lambda: lambda x: jax.nn.softmax(x @ x.swapaxes(1, 2) / np.sqrt(FEATURES)) @ x,
    "of one example": lambda: lambda x: attend(x[0], x[1], x[2]),
    "vmapped": lambda: jax.vmap(lambda x: jax.nn.softmax(x @ x.T) @ x),
    "in a jitted function": lambda: jax.jit(by_hand),
    "in a loop, computed again": lambda: run_twice,
}


QUICK = (
    "causal heads with a mask",
    "heads with dropout",
    "shared keys",
    "jax.nn with a bias",
    "vmapped",
    "in a loop, computed again",
)


@pytest.mark.parametrize("name", mostly_slow(ATTENTIONS, *QUICK))
def test_attention_and_its_gradient_are_two_calls(name):
    function = ATTENTIONS[name]()
    x = 0.3 * normal(X)
    again = 1 if name == "in a loop, computed again" else 0
    assert count_calls(function, x) == (1 + again, 1)
    assert_close(jax.jit(rewrite(function))(x), jax.jit(differentiate(function))(x))
    assert_close(jax.jit(rewrite_function(function, "cpu"))(x), jax.jit(function)(x))


@pytest.mark.parametrize("name", ["heads with a mask", "heads that may drop"])
def test_a_prediction_is_a_call_without_a_gradient(name):
    program = str(jax.make_jaxpr(rewrite_function(ATTENTIONS[name](), "cpu"))(normal(X)))
    assert program.count("target_name=unisono_attend\n") == 1
    assert "unisono_attend_gradient" not in program


def test_the_gradient_by_a_bias_is_summed_over_what_shares_it():
    q, k, v = normal((2, 3, 20, 4)), normal((2, 3, 30, 4), 1), normal((2, 3, 30, 5), 2)

    def function(q, k, v, bias):
        return attend(q, k, v, bias=bias)

    for shape in ((2, 3, 20, 30), (3, 20, 30), (1, 1, 30), (2, 1, 1, 30)):
        args = q, k, v, normal(shape, 3)
        assert count_calls(function, *args) == (1, 1)
        assert_close(jax.jit(rewrite(function))(*args), jax.jit(differentiate(function))(*args))


OTHERS = {
    "the weights are returned": lambda x: (lambda w: (w @ x).sum() + w)(jax.nn.softmax(x @ x.swapaxes(1, 2))),
    "a softmax over queries": lambda x: jax.nn.softmax(x @ x.swapaxes(1, 2), 1) @ x,
    "no softmax": lambda x: jnp.exp(x @ x.swapaxes(1, 2)) @ x,
    "a scale that is learnt": lambda x: jax.nn.softmax(x @ x.swapaxes(1, 2) * x.mean()) @ x,
    "few queries": lambda x: jax.nn.softmax(x[:, :7] @ x.swapaxes(1, 2)) @ x,
    "capped scores": lambda x: jax.nn.softmax(jnp.tanh(x @ x.swapaxes(1, 2))) @ x,
    "scaled after the mask": lambda x: jax.nn.softmax(jnp.where(MASK, x @ x.swapaxes(1, 2), -9.0) * 0.5) @ x,
    "filled with an array": lambda x: jax.nn.softmax(jnp.where(MASK, x @ x.swapaxes(1, 2), x[:, :, :1])) @ x,
    "another softmax's sum": lambda x: (lambda e: (e / jnp.exp(x @ x.swapaxes(1, 2)).sum(-1, keepdims=True)) @ x)(
        jnp.exp(x @ x.swapaxes(1, 2) - 1)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_attention_is_left_to_xla(name):
    function = OTHERS[name]
    assert count_calls(function, normal(X)) == (0, 0)
    assert_close(jax.jit(rewrite(function))(normal(X)), jax.jit(differentiate(function))(normal(X)), 2e-5)


def test_of_a_gradient_of_a_gradient_the_outer_one_is_taken_of_the_kernel_too():
    def penalty(x):
        return jax.grad(lambda x: (attend(x, x, x) ** 2).sum())(x)

    x = 0.1 * normal(X)
    assert_close(jax.jit(rewrite(penalty))(x), jax.jit(differentiate(penalty))(x), 2e-5)


SIZES = st.sampled_from([16, 17, 31, 33, 64, 65, 100, 129])
WIDTHS = st.sampled_from([2, 3, 8, 16, 17, 33, 64])
DIMENSIONS = "bhgqk"
"""Examples, heads with keys of their own, heads that share them, queries, keys."""

SHARES = st.sampled_from(["", "b", "h", "g", "q", "k", "bk", "hgqk", "bhgqk"])
"""The dimensions in which elements of a mask, a bias or kept weights differ."""

MANY = 2000
"""Elements of an array from which on a mean error says something."""


def shared(dimensions, sizes):
    return tuple(size if name in dimensions else 1 for name, size in zip(DIMENSIONS, sizes, strict=True))


@settings(max_examples=cases(1, 150))
@given(
    batch=st.sampled_from([1, 2, 5]),
    heads=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 1, 2]),
    queries=SIZES,
    keys=st.sampled_from([16, 19, 64, 130, 520, 600]),
    depth=WIDTHS,
    width=WIDTHS,
    order=st.sampled_from(list(itertools.permutations("bhgq"))),
    mask=st.none() | SHARES,
    bias=st.none() | SHARES,
    kept=st.none() | SHARES,
    size=st.sampled_from([0.1, 1.0, 3.0]),
    seed=st.integers(0, 1000),
)
def test_random_attentions(batch, heads, groups, queries, keys, depth, width, order, mask, bias, kept, size, seed):
    """Against float64: the mean error is at most half as large again as XLA's, and a unit of the last place of the largest terms."""
    batch = max(batch, -(-MANY // (heads * min(queries, keys) * min(depth, width))))
    sizes = dict(zip(DIMENSIONS, (batch, heads, groups, queries, keys), strict=True))
    order_of_keys = [name.replace("q", "k") for name in order if name != "g"]
    q = size * normal([*(sizes[name] for name in order), depth], seed)
    k, v = (size * normal([*(sizes[name] for name in order_of_keys), n], seed + n) for n in (depth, width))
    masks = None if mask is None else truths(shared(mask, sizes.values()), seed)
    kept_weights = None if kept is None else truths(shared(kept, sizes.values()), seed + 1)
    of_queries, of_keys = "".join(order) + "d", "".join(order_of_keys) + "d"

    def multiply(q, k):
        return jnp.einsum(f"{of_queries},{of_keys}->bhgqk", q, k) * 0.25

    def weigh(scores):
        weights = jax.nn.softmax(scores if masks is None else jnp.where(masks, scores, -1e9))
        return weights if kept_weights is None else jnp.where(kept_weights, weights / 0.8, 0)

    def mix(weights, v):
        return jnp.einsum(f"bhgqk,{of_keys}->bhgqd", weights, v)

    def function(q, k, v, *biases):
        return mix(weigh(sum(biases, multiply(q, k))), v)

    def sum_terms(q, k, v, *biases):
        """Return, for each gradient and for the result, the sizes of what is added up in each element."""
        scores = sum(biases, multiply(q, k))
        weights, out = weigh(scores), function(q, k, v, *biases)
        by_scores = abs(pull(lambda scores: mix(weigh(scores), v), scores, cosines(out)))
        by_keys = pull(lambda k: multiply(abs(q), k), k, by_scores)
        by_values = pull(lambda v: mix(weights, v), v, abs(cosines(out)))
        by_biases = [pull(lambda bias: jnp.broadcast_to(bias, scores.shape), bias, by_scores) for bias in biases]
        return (pull(lambda q: multiply(q, abs(k)), q, by_scores), by_keys, by_values, *by_biases), mix(weights, abs(v))

    args = (q, k, v) if bias is None else (q, k, v, normal(shared(bias, sizes.values()), seed))
    assert count_calls(function, *args) == (1, 1)
    ours, plain = jax.jit(rewrite(function))(*args), jax.jit(differentiate(function))(*args)
    with jax.enable_x64(True):
        args = [jnp.asarray(arg, "float64") for arg in args]
        exact, terms = differentiate(function)(*args), sum_terms(*args)
    for a, b, c, sizes_of_terms in zip(*map(jax.tree.leaves, (ours, plain, exact, terms)), strict=True):
        error, error_of_xla = (np.abs(np.asarray(x, "float64") - np.asarray(c)).mean() for x in (a, b))
        unit = 2.0**-24 * np.asarray(sizes_of_terms).mean()
        assert error <= 1.5 * error_of_xla + unit, (error / unit, error_of_xla / unit, c.shape)


@pytest.mark.parametrize("where", ["queries", "keys", "values", "hidden keys"])
@pytest.mark.parametrize("value", [np.nan, *slow(np.inf)])
def test_what_is_not_finite_reaches_what_it_reaches_in_xla(where, value):
    q, k, v = normal((2, 20, 2, 8)), normal((2, 40, 2, 8), 1), normal((2, 40, 2, 8), 2)
    changed = {"queries": q, "keys": k, "values": v, "hidden keys": k}[where].copy()
    changed[1, 7, 1, 3] = value
    q, k, v = (
        changed if name == where.split()[-1] else x for name, x in zip(("queries", "keys", "values"), (q, k, v), strict=True)
    )
    mask = jnp.arange(40) != 7 if where == "hidden keys" else jnp.ones(40, bool)

    def function(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None, None])

    assert count_calls(function, q, k, v) == (1, 1)
    for ours, plain in zip(
        jax.tree.leaves(jax.jit(rewrite(function))(q, k, v)),
        jax.tree.leaves(jax.jit(differentiate(function))(q, k, v)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(plain))


def test_a_row_has_the_same_bits_alone_and_in_every_place_of_a_batch():
    q, k, v = normal((9, 70, 2, 8)), normal((9, 90, 2, 8), 1), normal((9, 90, 2, 8), 2)
    run = jax.jit(rewrite(lambda q, k, v: jax.nn.dot_product_attention(q, k, v)))
    (by_q, by_k, by_v), out = run(q, k, v)
    forward = jax.jit(rewrite_function(jax.nn.dot_product_attention, "cpu"))
    for rows in (slice(0, 1), slice(4, 5), slice(2, 9)):
        np.testing.assert_array_equal(forward(q[rows], k[rows], v[rows]), out[rows])

    def differentiate_rows(q, k, v, by_out):
        loss = rewrite_before_gradient(lambda q, k, v: (jax.nn.dot_product_attention(q, k, v) * by_out).sum())
        return jax.grad(loss, (0, 1, 2))(q, k, v)

    run_backward = jax.jit(rewrite_function(differentiate_rows, "cpu"))
    for rows in (slice(3, 9), slice(2, 7)):  # of few items, blocks are summed in groups
        for part, whole in zip(run_backward(q[rows], k[rows], v[rows], cosines(out)[rows]), (by_q, by_k, by_v), strict=True):
            np.testing.assert_array_equal(part, whole[rows])
