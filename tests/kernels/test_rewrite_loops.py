"""Products leave a loop if they do not need the step before, and the loop returns what it returned."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from rewritten import assert_close, build_layer, normal
from sizes import cases, mostly_slow
from unisono._src.kernels.loops import loops
from unisono._src.kernels.rewriting import CPU_LOOPS, find_loop_replacement, rewrite_function
from unisono._src.programs.equations import Rewriter

pytestmark = pytest.mark.usefixtures("without_native_kernels")


def count_in_loops(program, names=("dot_general",), inside=False):
    count = 0
    for eqn in program.eqns:
        count += inside and eqn.primitive.name in names
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda value: isinstance(value, (Jaxpr, ClosedJaxpr))):
            if isinstance(value, (Jaxpr, ClosedJaxpr)):
                count += count_in_loops(getattr(value, "jaxpr", value), names, inside or eqn.primitive.name == "scan")
    return count


def hoist(function, *args):
    """The program of a function without the products and sums that leave its loops."""
    return Rewriter(functools.partial(find_loop_replacement, CPU_LOOPS))(jax.make_jaxpr(function)(*args))


LAYERS = {
    "lstm": (lambda: keras.layers.LSTM(5), 2),
    "gru": (lambda: keras.layers.GRU(5), 2),
    "gru before": (
        lambda: keras.layers.GRU(5, reset_after=False),
        4,
    ),  # of gradients by parts of the kernel, padded before they are added
    "simple": (lambda: keras.layers.SimpleRNN(5, return_sequences=True), 2),
    "backwards": (lambda: keras.layers.LSTM(5, go_backwards=True, return_sequences=True), 2),
    "dropout": (lambda: keras.layers.LSTM(5, dropout=0.4, recurrent_dropout=0.4, seed=1), None),
    "both": (lambda: keras.layers.Bidirectional(keras.layers.LSTM(5)), 4),
    "stacked": (lambda: keras.layers.RNN([keras.layers.LSTMCell(5), keras.layers.LSTMCell(5)]), None),
}


@pytest.mark.parametrize(
    ("name", "masked"),
    mostly_slow(itertools.product(LAYERS, (False, True)), ("gru before", False), ("both", True)),
)
def test_recurrent_layers(name, masked):
    """Of each gate's products, only that of the state stays in the loop, and its counterpart in the loop of the gradient; no sum stays."""
    make, left = LAYERS[name]
    layer = make()
    weights, _ = build_layer(layer, 6, 3)
    x = normal((4, 6, 3))
    mask = jnp.arange(6) < jnp.asarray([[6], [2], [4], [1]]) if masked else None

    def loss(weights, x):
        y, _ = layer.stateless_call(weights, [v.value for v in layer.non_trainable_variables], x, mask=mask, training=True)
        return (y**2).sum()

    step = jax.value_and_grad(loss, (0, 1))
    assert_close(jax.jit(step)(weights, x), jax.jit(rewrite_function(step, "cpu"))(weights, x))
    if left is not None:
        assert count_in_loops(hoist(step, weights, x).jaxpr, ("dot_general", "reduce_sum")) == left


def run(function, *args):
    return jax.jit(function)(*args), jax.jit(rewrite_function(function, "cpu"))(*args)


W, XS, YS = normal((3, 4)), normal((7, 5, 3), 1), normal((7, 5, 4), 2)


def scan_of_inputs(w, xs, ys):
    return lax.scan(lambda total, place: (total + (place[0] @ w).sum(), place[1] * 2), 0.0, (xs, ys))


def scan_of_places(w, xs, ys):
    """The left operand is the place of one step, then the right one."""

    def step(count, place):
        return count + 1, jnp.tensordot(place[0], place[1], ((0,), (0,))).max() + jnp.tensordot(w, place[0], ((0,), (1,))).min()

    return lax.scan(step, 0, (xs, ys))


def scan_of_results(w, xs, ys):
    def step(state, place):
        state = jnp.tanh(state + place[0])
        return state, (state @ w, w.T @ state.T)

    return lax.scan(step, XS[0], (xs, ys), reverse=True)


def scan_of_sums(w, xs, ys):
    def step(carry, place):
        total, other, state = carry
        state = jnp.tanh(state + place[1])
        return (total + place[0].T @ state, (state.T @ place[0]).T + other, state), state.sum()

    return lax.scan(step, (w, w + 1, ys[0]), (xs, ys))


@pytest.mark.parametrize("scan", [scan_of_inputs, scan_of_places, scan_of_results, scan_of_sums])
def test_products_that_leave(scan):
    assert_close(*run(scan, W, XS, YS))
    assert count_in_loops(hoist(scan, W, XS, YS).jaxpr) == 0


def sum_that_is_read(w, xs, ys):
    def step(total, place):
        return total + jnp.tensordot(place[0] * total.sum(), place[1], ((0,), (0,))), None

    return lax.scan(step, w, (xs, ys))


def state_is_multiplied(w, xs, ys):
    return lax.scan(lambda state, place: (jnp.tanh(state @ w.T) @ w + place[1], None), ys[0], (xs, ys))


def carry_is_a_result_too(w, xs, ys):
    def step(total, place):
        total = total + jnp.tanh(place[0]).T @ place[1]
        return total, total

    return lax.scan(step, w, (xs, ys))


def operand_is_shared(w, xs, ys):
    """A sum of products with the same operand at every step."""
    return lax.scan(lambda total, place: (total + jnp.tanh(place[0]) @ w, None), ys[0], (xs, ys))


def result_of_constants(w, xs, ys):
    """The state never changes, so that the product is the same at every step."""
    return lax.scan(lambda state, place: (state, state @ w), xs[0], xs)


@pytest.mark.parametrize(
    ("scan", "left"),
    [
        (sum_that_is_read, 1),
        (state_is_multiplied, 2),
        (carry_is_a_result_too, 1),
        (operand_is_shared, 1),
        (result_of_constants, 1),
    ],
)
def test_products_that_need_the_step_before_stay(scan, left):
    assert_close(*run(scan, W, XS, YS))
    assert count_in_loops(hoist(scan, W, XS, YS).jaxpr) == left


def test_a_loop_of_one_step_and_one_without_products_stay_as_they_are():
    for program in (
        jax.make_jaxpr(lambda xs: lax.scan(lambda n, x: (n, x @ W), 0, xs))(XS[:1]),
        jax.make_jaxpr(lambda xs: lax.scan(lambda n, x: (n + 1, x * 2), 0, xs))(XS),
    ):
        assert Rewriter(functools.partial(find_loop_replacement, CPU_LOOPS))(program) is program


def test_operands_that_are_large_at_all_steps_together_stay(monkeypatch):
    monkeypatch.setattr(loops, "MOST_STACKED", 7 * 5 * 4 - 1)
    assert count_in_loops(hoist(scan_of_inputs, W, XS, YS).jaxpr) == 1


SQUARE = normal((5, 5), 3)


@settings(max_examples=cases(4, 600))
@given(data=st.data())
def test_random_loops(data):
    """Of products, sums and functions of constants, states, places and what is made of them, in any order."""
    names = ("product", "product of the transposed", "sum", "function", "rows")
    operations = data.draw(st.lists(st.tuples(st.sampled_from(names), st.integers(0, 99), st.integers(0, 99)), max_size=6))
    outputs = data.draw(st.lists(st.integers(0, 99), min_size=2, max_size=4))
    length, is_reversed = data.draw(st.sampled_from([1, 2, 5])), data.draw(st.booleans())

    def step(constant, states, place):
        made = [constant, *states, place, jnp.float32(2) * jnp.eye(5)]
        for name, first, second in operations:
            x, y = made[first % len(made)], made[second % len(made)]
            compute = {
                "product": lambda x, y: x @ y / 5,
                "product of the transposed": lambda x, y: x.T @ y / 5,
                "sum": lambda x, y: (x + y) / 2,
                "function": lambda x, y: jnp.tanh(x),
                "rows": lambda x, y: x.sum(0, keepdims=True) * y / 5,
            }
            made.append(compute[name](x, y))
        chosen = [made[place % len(made)] for place in outputs]
        return tuple(chosen[:2]), chosen[2:]

    def loop(constant, states, places):
        return lax.scan(functools.partial(step, constant), states, places, reverse=is_reversed)

    def gradient(*args):
        return jax.grad(lambda *args: sum((leaf**2).sum() for leaf in jax.tree.leaves(loop(*args))), (0, 1, 2))(*args)

    args = SQUARE, (SQUARE + 1, SQUARE.T), normal((length, 5, 5), 4)
    assert_close(*run(loop, *args), 1e-4)
    assert_close(*run(gradient, *args), 1e-4)


def test_a_second_derivative_of_a_loop():
    def loss(w):
        return (lax.scan(lambda h, x: (jnp.tanh(x @ w + h), None), YS[0], XS)[0] ** 2).sum()

    def step(w):
        return jax.grad(lambda w: (jax.grad(loss)(w) ** 2).sum())(w)

    assert_close(*run(step, W))
