"""Loops keep less for the loops of their gradients, and the gradients stay what they were."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from rewritten import build_layer, normal
from sizes import mostly_slow
from unisono._src.kernels.loops.residuals import recompute_residuals
from unisono._src.programs.inlining import inline_calls

STEPS = 5


def count_kept(program):
    """Return, for each loop of a program, how many arrays of all steps it makes."""
    loops = [eqn for eqn in inline_calls(program).jaxpr.eqns if eqn.primitive.name == "scan"]
    return [sum(atom.aval.shape[:1] == (STEPS,) for atom in eqn.outvars) for eqn in loops]


def recompute(function, *args):
    """Return how many arrays the loops of a function keep before and after, and what the function returns before and after."""
    traced = inline_calls(jax.make_jaxpr(function)(*args))
    shorter = ClosedJaxpr(recompute_residuals(traced.jaxpr), traced.consts)
    results = (jax.jit(jaxpr_as_fun(program))(*jax.tree.leaves(args)) for program in (traced, shorter))
    return count_kept(traced), count_kept(shorter), *results


LAYERS = {
    "lstm": (lambda: keras.layers.LSTM(5), 5),
    "lstm backwards": (lambda: keras.layers.LSTM(5, go_backwards=True, return_sequences=True), 5),
    "gru": (lambda: keras.layers.GRU(5), 4),
    "both": (lambda: keras.layers.Bidirectional(keras.layers.LSTM(5)), 10),
}


@pytest.mark.parametrize(
    ("name", "masked"),
    mostly_slow(itertools.product(LAYERS, (False, True)), ("lstm backwards", False), ("both", True)),
)
def test_recurrent_layers(name, masked):
    make, fewer = LAYERS[name]
    layer = make()
    weights, others = build_layer(layer, STEPS, 3)
    mask = jnp.arange(STEPS) < jnp.asarray([[5], [2], [4], [1]]) if masked else None

    def step(weights, x):
        def loss(weights, x):
            return (layer.stateless_call(weights, others, x, mask=mask)[0] ** 2).sum()

        return jax.grad(loss, (0, 1))(weights, x)

    before, after, plain, shorter = recompute(step, weights, normal((4, STEPS, 3)))
    assert sum(before) - sum(after) == fewer
    for a, b in zip(plain, shorter, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-6 * np.abs(a).max())


def run(step, carry, places, **options):
    return lax.scan(step, carry, places, length=STEPS, **options)


def keep_product(carry, x):
    """A step that keeps its square root, and what a square root makes of it."""
    root = jnp.sqrt(x)
    return carry + root, (root, root * (1 - root))


def check_recomputed(function, before, after):
    *counts, plain, shorter = recompute(function, abs(normal((STEPS, 3))))
    assert counts == [before, after]
    for a, b in zip(plain, shorter, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6)


def test_a_result_that_another_loop_computes_is_not_kept():
    def function(x):
        total, (roots, products) = run(keep_product, jnp.zeros(3), x)
        return total, run(lambda c, places: (c + places[0] * places[1], ()), jnp.zeros(3), (roots, products), reverse=True)[0]

    check_recomputed(function, [2, 0], [1, 0])


def test_a_loop_reads_what_its_recipe_needs():
    """The later loop did not read the roots before."""

    def function(x):
        _, (_, products) = run(keep_product, jnp.zeros(3), x)
        return run(lambda c, place: (c + place, c * place), jnp.zeros(3), products)

    check_recomputed(function, [2, 1], [1, 1])


def test_two_loops_of_one_step_follow_one_after_the_other():
    """Their steps have the same variables."""

    def step(carry, place):
        root, product = place
        new = jnp.sqrt(root + product * product)
        return carry + new, (new, new * (1 - new))

    def function(x, y):
        carry, places = jnp.zeros(3), (x, y)
        for _ in range(3):
            carry, places = run(step, carry, places)
        return run(lambda c, place: (c + place[0] * place[1], ()), carry, places)[0]

    before, after, plain, shorter = recompute(function, abs(normal((STEPS, 3))), normal((STEPS, 3), 1))
    assert (before, after) == ([2, 2, 2, 0], [1, 1, 1, 0])
    np.testing.assert_allclose(shorter[0], plain[0], rtol=1e-6)


@pytest.mark.parametrize("reader", ["a result", "a sum", "a constant", "other steps"])
def test_what_others_read_is_kept(reader):
    def function(x):
        _, (roots, products) = run(keep_product, jnp.zeros(3), x)
        if reader == "a result":
            return roots, products
        if reader == "a sum":
            return roots, products.sum()
        if reader == "a constant":
            return run(lambda c, root: (c + root * products.sum(), ()), jnp.zeros(3), roots)[0]
        halves = products.reshape(-1)[: 3 * (STEPS - 1)].reshape(STEPS - 1, 3)
        return lax.scan(lambda c, place: (c + place, ()), jnp.zeros(3), halves)[0], roots

    before, after, plain, shorter = recompute(function, abs(normal((STEPS, 3))))
    assert before == after
    for a, b in zip(plain, shorter, strict=True):
        np.testing.assert_array_equal(b, a)


def test_what_takes_more_than_products_and_sums_is_kept():
    def function(x):
        def step(carry, x):
            root = jnp.sqrt(x)
            return carry + root, (root, jnp.exp(root))

        _, places = run(step, jnp.zeros(3), x)
        return run(lambda c, place: (c + place[0] * place[1], ()), jnp.zeros(3), places)[0]

    before, after, *_ = recompute(function, abs(normal((STEPS, 3))))
    assert before == after == [2, 0]
