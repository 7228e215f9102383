"""A rewritten program computes what the plain one does, and holds none of what is slow."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

from rewritten import as_it_is, assert_close, assert_same, both, equations, normal, primitives
from sizes import mostly_slow, slow
from unisono._src.kernels.rewriting import rewrite_function
from unisono._src.programs.equations import NESTED

pytestmark = pytest.mark.usefixtures("without_native_kernels")

SLOW = {"select_and_scatter_add", "reduce_window_max", "reduce_window_min", "reduce_window_sum"}


def max_pool(x, window, strides, padding):
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


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

    state, batch = {"w": jnp.asarray(normal((3, 3, 2, 3))), "unused": None}, normal((2, 6, 6, 2))
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
