"""Loops whose rows do not meet run in the native kernel, and return what XLA's loop returns; other loops stay."""

from __future__ import annotations

import functools
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import rewritten
from rewritten import NEEDS_KERNELS, build_layer, normal
from sizes import cases, mostly_slow, slow
from unisono._src.kernels.native import row_loops
from unisono._src.kernels.rewriting import rewrite_function

pytestmark = NEEDS_KERNELS


def count_calls(function, *args):
    """Return how many loops of a rewritten function the kernel runs, and how many XLA does."""
    program = str(jax.make_jaxpr(rewrite_function(function, "cpu"))(*args))
    return program.count("unisono_run_row_loop"), program.count("= scan[")


assert_close = functools.partial(rewritten.assert_close, tolerance=2e-6)

LAYERS = {
    "lstm": lambda: keras.layers.LSTM(5),
    "wide lstm": lambda: keras.layers.LSTM(48, return_sequences=True),
    "deep lstm": lambda: keras.layers.LSTM(150),
    "gru": lambda: keras.layers.GRU(33, return_sequences=True),
    "gru before": lambda: keras.layers.GRU(5, reset_after=False),
    "simple": lambda: keras.layers.SimpleRNN(16, activation="relu"),
    "hard": lambda: keras.layers.LSTM(7, recurrent_activation="hard_sigmoid"),
    "backwards": lambda: keras.layers.LSTM(9, go_backwards=True, return_sequences=True),
    "both": lambda: keras.layers.Bidirectional(keras.layers.GRU(6)),
    "stacked": lambda: keras.layers.RNN([keras.layers.LSTMCell(5), keras.layers.GRUCell(6)]),
    "dropout": lambda: keras.layers.LSTM(5, dropout=0.3, recurrent_dropout=0.3, seed=1),
}


def make_layer_step(name, masked, rows, steps=6):
    layer = LAYERS[name]()
    weights, others = build_layer(layer, steps, 3)
    x = normal((rows, steps, 3))
    mask = jnp.asarray(np.random.default_rng(1).random((rows, steps)) < 0.7) if masked else None
    weights = [value + 0.1 * normal(value.shape, 2) for value in weights]

    def step(weights, x):
        def loss(weights, x):
            y, _ = layer.stateless_call(weights, others, x, mask=mask, training=True)
            return (y**2).sum(), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(weights, x)

    return step, weights, x


@pytest.mark.parametrize(
    ("name", "masked"), mostly_slow(itertools.product(LAYERS, (False, True)), ("deep lstm", False), ("dropout", True))
)
def test_recurrent_layers_forward_and_backward(name, masked):
    step, weights, x = make_layer_step(name, masked, rows=21)
    assert_close(jax.jit(step)(weights, x), jax.jit(rewrite_function(step, "cpu"))(weights, x))
    assert count_calls(step, weights, x) == (4 if name == "both" else 2, 0)


def test_a_layer_with_initial_states_returns_its_states():
    layer = keras.layers.LSTM(6, return_state=True)
    weights, others = build_layer(layer, 5, 3)

    def step(weights, x, h, c):
        return layer.stateless_call(weights, others, x, initial_state=[h, c])[0]

    args = weights, normal((18, 5, 3)), normal((18, 6), 1), normal((18, 6), 2)
    assert_close(jax.jit(step)(*args), jax.jit(rewrite_function(step, "cpu"))(*args))
    assert count_calls(step, *args) == (1, 0)


@pytest.mark.parametrize("name", ["lstm", *slow("gru")])
def test_a_row_has_the_same_bits_alone_and_in_every_place_of_a_batch(name):
    _, weights, x = make_layer_step(
        name, False, rows=37, steps=130
    )  # so that the product before the loop is the kernel's for one row too
    layer = LAYERS[name]()
    _, others = build_layer(layer, 130, 3)
    run = jax.jit(rewrite_function(lambda x: layer.stateless_call(weights, others, x)[0], "cpu"))
    whole = np.asarray(run(x))
    for rows in (slice(0, 1), slice(5, 6), slice(30, 37), slice(3, 20)):
        np.testing.assert_array_equal(run(x[rows]), whole[rows])
    np.testing.assert_array_equal(run(x[::-1]), whole[::-1])


def test_what_is_not_finite_stays_in_its_row():
    step, weights, x = make_layer_step("lstm", False, rows=20)
    (_, y), (_, by_x) = jax.jit(rewrite_function(step, "cpu"))(weights, jnp.asarray(x).at[3, 2, 1].set(jnp.nan))
    for values in (y, by_x):
        assert np.isnan(values[3]).any()
        assert np.isfinite(np.delete(np.asarray(values), 3, axis=0)).all()


# What a step may be made of. Where it compares, it compares numbers that are not rounded: a comparison falls the same way in both programs.

SMOOTH = {
    "neg": lambda x, *_: -x,
    "exp": lambda x, *_: jnp.exp(jnp.tanh(x)),
    "tanh": lambda x, *_: jnp.tanh(x),
    "logistic": lambda x, *_: jax.nn.sigmoid(x),
    "sqrt": lambda x, *_: jnp.sqrt(lax.square(x) + 0.1),
    "rsqrt": lambda x, *_: lax.rsqrt(lax.square(x) + 0.1),
    "power": lambda x, *_: jnp.tanh(x) ** 3,
    "part": lambda x, *_: jnp.concatenate([x[:, 2:], x[:, :2]], 1),
    "pad": lambda x, *_: jnp.pad(x[:, :-3], ((0, 0), (1, 2)), constant_values=0.5),
    "split": lambda x, *_: jnp.concatenate(jnp.split(x, [1, 3], axis=1)[::-1], 1),
    "first": lambda x, *_: x + x[:, :1],
    "column": lambda x, *_: jnp.broadcast_to(x[:, 1:2] * 0.3, x.shape) - 0.1,
    "squeeze": lambda x, *_: jnp.squeeze(lax.expand_dims(x, [2]) * 0.9, 2) + lax.reshape(x, (*x.shape, 1))[:, :, 0],
    "add": lambda x, y, *_: x + y,
    "sub": lambda x, y, *_: x - y,
    "mul": lambda x, y, *_: jnp.tanh(x) * y,
    "div": lambda x, y, *_: x / (1 + lax.square(y)),
    "where": lambda x, y, p, q: jnp.where((p < q) & ~(p == 0) | (q > 1), x, y * 0.5),
    "where column": lambda x, y, p, q: jnp.where(p[:, :1] >= q[:, 1:2], x, y),
    "sign": lambda x, y, p, q: x * ((p > q).astype("float32") - (p <= 0.1).astype("float32")),
}
KINKED = {
    "abs": lambda x, *_: abs(x),
    "clamp": lambda x, *_: lax.clamp(-0.5, x, 0.7),
    "relu": lambda x, *_: jax.nn.relu(x),
    "max": lambda x, y, *_: jnp.maximum(x, y),
    "min": lambda x, y, *_: jnp.minimum(x, y),
}
"""Operations whose gradients jump: only their values are compared."""


def draw_words(names):
    return st.lists(st.tuples(st.sampled_from(sorted(names)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9)


@settings(max_examples=cases(4, 300), deadline=None)
@given(
    words=st.one_of(st.tuples(st.just(True), draw_words(SMOOTH)), st.tuples(st.just(False), draw_words(SMOOTH | KINKED))),
    rows=st.sampled_from([1, 2, 7, 16, 17, 40]),
    width=st.sampled_from([4, 5, 16, 33]),
    is_reversed=st.booleans(),
)
def test_random_steps(words, rows, width, is_reversed):
    """A step of random operations on its carries, its place, its constants and on what it has made, with products."""
    is_differentiated, words = words

    def run(w, u, bias, fixed, first, places):
        def step(carry, place):
            h, c = carry
            values = [h, c, place, jnp.tanh(h @ w + bias), fixed, jnp.tanh(c @ u.T), jnp.broadcast_to(bias, h.shape)]
            for name, left, right in words:
                x, y = values[-1 - left % len(values)], values[right % len(values)]
                values.append((SMOOTH | KINKED)[name](x, y, place, fixed))
            new = jnp.tanh(values[-1])
            return (new, jnp.tanh(h + place)), (new * 0.5, fixed > place, c)

        lasts, (y, truth, cs) = lax.scan(step, (first, first * 0.5), places, reverse=is_reversed)
        return (y * cs).sum() + sum(map(jnp.sum, lasts)), (y, cs, lasts, truth)

    args = (
        normal((width, width)) * 0.3,
        normal((width, width), 1) * 0.3,
        normal((width,), 2),
        normal((rows, width), 3),
        normal((rows, width), 4),
        normal((5, rows, width), 5),
    )
    function = jax.value_and_grad(run, (0, 1, 2, 3, 4, 5), has_aux=True) if is_differentiated else run
    plain, ours = jax.jit(function)(*args), jax.jit(rewrite_function(function, "cpu"))(*args)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=3e-5 * max(1.0, np.abs(a).max()), err_msg=str(words))
    assert count_calls(run, *args) == (1, 0)


FUNCTIONS = {"tanh": (jnp.tanh, np.tanh), "logistic": (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x))), "exp": (jnp.exp, np.exp)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_as_exact_as_those_of_xla(name):
    """Over all sizes of numbers, beside the exact values: in units of the last place."""
    function, exact = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.uniform(-90, 88, 4000), rng.standard_normal(4000), rng.standard_normal(4000) * 1e-4, rng.standard_normal(4000) * 10]
    )
    x = x.astype("float32").reshape(1, -1, 16)

    def run(x):
        return lax.scan(lambda h, place: (h @ jnp.eye(16) + 0 * place, function(place)), x[0], x)[1]

    with np.errstate(over="ignore"):
        true = exact(x.astype("float64"))
    unit = np.maximum(np.spacing(np.abs(true).astype("float32")).astype("float64"), np.finfo("float32").tiny)
    errors = [np.abs(np.asarray(f(x), "float64") - true) / unit for f in (jax.jit(run), jax.jit(rewrite_function(run, "cpu")))]
    assert count_calls(run, x)[0] == 1
    assert errors[1].max() <= 3
    assert errors[1].mean() <= 1.5 * max(errors[0].mean(), 0.25)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_what_is_not_finite(name):
    function, _ = FUNCTIONS[name]
    x = jnp.asarray(
        [[np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-38, -1e-38, 89, -104, 3e38, -3e38, 1e-45, 88.7, -87.4, 1, -1]] * 3, "float32"
    )[:, None]

    def run(x):
        return lax.scan(lambda h, place: (h @ jnp.eye(16), function(place)), jnp.ones((1, 16)), x)[1]

    ours = np.asarray(jax.jit(rewrite_function(run, "cpu"))(x))
    # Numbers below 1.2e-38 are zero on the threads of XLA.
    np.testing.assert_allclose(ours, np.asarray(function(x)), rtol=1e-6, atol=1.2e-38)
    assert count_calls(run, x)[0] == 1


# Loops that stay XLA's.

W, XS, FIRST = normal((4, 4)), normal((5, 6, 4), 1), normal((6, 4), 2)


def rows_meet(w, xs, first):
    return lax.scan(lambda h, x: (jnp.tanh(h @ w + x)[::-1], None), first, xs)


def rows_are_summed(w, xs, first):
    return lax.scan(lambda h, x: (jnp.tanh(h @ w + x - h.mean(0)), None), first, xs)


def rows_are_multiplied(w, xs, first):
    return lax.scan(lambda h, x: (jnp.tanh(w @ h.T @ h @ x.T @ x), None), jnp.ones((4, 4)), xs)


def matrix_changes(w, xs, first):
    def step(carry, x):
        h, w = carry
        return (jnp.tanh(h @ w), w * 0.9), h

    return lax.scan(step, (first, w), xs)


def steps_are_counted(w, xs, first):
    def step(carry, x):
        h, count = carry
        return (jnp.tanh(h @ w) * count, count + 1), x

    return lax.scan(step, (first, 0), xs)


def has_no_product(w, xs, first):
    return lax.scan(lambda h, x: (jnp.tanh(h + x), h), first, xs)


def is_in_half_precision(w, xs, first):
    w, xs, first = (value.astype("bfloat16") for value in (w, xs, first))
    return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h), first, xs)


@pytest.mark.parametrize(
    "loop",
    [rows_meet, rows_are_summed, rows_are_multiplied, matrix_changes, steps_are_counted, has_no_product, is_in_half_precision],
)
def test_other_loops_stay(loop):
    assert count_calls(loop, W, XS, FIRST) == (0, 1)
    assert_close(jax.jit(loop)(W, XS, FIRST), jax.jit(rewrite_function(loop, "cpu"))(W, XS, FIRST), tolerance=1e-5)


def test_the_words_of_python_are_those_of_the_kernel():
    source = (pathlib.Path(__file__).parents[3] / "native/row_loop.cc").read_text()
    for enumeration, words in (("Operation", row_loops.OPERATIONS), ("Kind", row_loops.KINDS)):
        (body,) = re.findall(rf"enum {enumeration} : int64_t {{(.*?)}};", source, re.DOTALL)
        names = re.findall(r"\b([A-Z_]+)\b", re.sub(r"//.*", "", body))
        assert [name.lower().replace("_", " ") for name in names] == list(words)
