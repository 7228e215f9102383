"""Loops whose last result alone is read make no results, and no gradients of zeros; other loops stay."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from rewritten import build_layer, normal
from sizes import mostly_slow
from unisono._src.kernels.loops.last_results import read_last_results_from_carries
from unisono._src.programs.inlining import inline_calls

STEPS = 5


def shorten(function, *args):
    """Return how many results of all steps the loops of a program make before and after, and its gradients before and after."""
    leaves = jax.tree.leaves(args)
    traced = jax.make_jaxpr(function)(*args)
    program, is_needed = read_last_results_from_carries(traced)

    def run_shorter(*leaves):
        return jaxpr_as_fun(program)(*(leaf for leaf, needed in zip(leaves, is_needed, strict=True) if needed))

    places = range(len(leaves))

    def differentiate(run):
        return jax.jit(jax.value_and_grad(lambda *leaves: sum(result.sum() for result in run(*leaves)), places))(*leaves)

    gradients = map(differentiate, (jaxpr_as_fun(traced), run_shorter))
    return count_results(traced), count_results(program), *gradients


def count_results(program):
    loops = [eqn for eqn in inline_calls(program).jaxpr.eqns if eqn.primitive.name == "scan"]
    return [sum(atom.aval.shape[:1] == (STEPS,) for atom in eqn.outvars) for eqn in loops]


def assert_same(plain, other):
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-6)


LAYERS = {
    "lstm": (lambda: keras.layers.LSTM(4), [0]),
    "backwards": (lambda: keras.layers.LSTM(4, go_backwards=True), [0]),
    "both": (lambda: keras.layers.Bidirectional(keras.layers.LSTM(4)), [0, 0]),
    "simple": (lambda: keras.layers.SimpleRNN(4), [0]),
    "states": (lambda: keras.layers.LSTM(4, return_state=True), [0]),
    "sequences": (lambda: keras.layers.LSTM(4, return_sequences=True), [1]),
    "sequences and states": (lambda: keras.layers.LSTM(4, return_sequences=True, return_state=True), [1]),
}


@pytest.mark.parametrize("name", mostly_slow(LAYERS, "backwards", "states", "sequences"))
def test_recurrent_layers(name):
    make, expected = LAYERS[name]
    layer = make()
    weights, others = build_layer(layer, STEPS, 3)

    def run(weights, x):
        return [jnp.tanh(y) ** 2 for y in jax.tree.leaves(layer.stateless_call(weights, others, x)[0])]

    before, after, plain, shorter = shorten(run, weights, normal((6, STEPS, 3)))
    assert before == [1] * len(expected)
    assert after == expected
    assert_same(plain, shorter)


def run_loop(x, first, reverse=False):
    def step(h, place):
        h = jnp.tanh(h + place)
        return h, (h, 2 * h)

    return lax.scan(step, first, x, reverse=reverse)


READERS = {
    "the first": lambda h, ys: ys[0][0],
    "the one before the last": lambda h, ys: ys[0][-2],
    "the last two": lambda h, ys: ys[0][-2:],
    "a part of the last": lambda h, ys: ys[0][-1:, 1:],
    "every other element of the last": lambda h, ys: ys[0][-1:, ::2],
    "what is no state": lambda h, ys: ys[1][-1],
    "every other one": lambda h, ys: ys[0][::2],
    "the first of the reversed": lambda h, ys: ys[0][::-1][-1],
    "all of them too": lambda h, ys: ys[0][-1] + ys[0].sum(0),
}


@pytest.mark.parametrize(
    ("name", "reverse"),
    mostly_slow(
        itertools.product(READERS, (False, True)),
        *((name, False) for name in READERS),
        ("the first", True),
        ("the one before the last", True),
        ("the first of the reversed", True),
    ),
)
def test_other_results_are_made(name, reverse):
    def run(x, first):
        return READERS[name](*run_loop(x, first, reverse))

    before, after, plain, shorter = shorten(run, normal((STEPS, 2, 3)), normal((2, 3), 1))
    if reverse and name in ("the first", "the first of the reversed"):  # then the first place is of the last step
        assert after == [0]
    else:
        assert after == ([1] if name == "all of them too" and not reverse else before) != [0]
    assert_same(plain, shorter)


def test_the_last_result_and_the_state_beside_it_and_an_argument_that_nothing_reads():
    def run(x, first, unread):
        h, (ys, _) = run_loop(x, first)
        return h * ys[-1]

    _, after, plain, shorter = shorten(run, normal((STEPS, 2, 3)), normal((2, 3), 1), normal((2, 2)))
    assert after == [0]
    assert_same(plain, shorter)


def test_a_program_without_such_a_loop_stays_the_same_object():
    program = jax.make_jaxpr(lambda x, first: run_loop(x, first)[1])(normal((STEPS, 2, 3)), normal((2, 3)))
    assert read_last_results_from_carries(program)[0] is program
