"""What the tests of rewritten programs share: their equations, the native kernels that they call, and whether they compute what XLA computes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from unisono._src.engine.xla.determinism import get_compiler_options
from unisono._src.kernels.before_gradient import rewrite_before_gradient
from unisono._src.kernels.native.library import load_kernels
from unisono._src.kernels.rewriting import CPU, find_replacement, rewrite_function
from unisono._src.programs.equations import Rewriter

NEEDS_KERNELS = pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason))


def normal(shape: tuple[int, ...], seed: int = 0, dtype: Any = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def equations(program: Any) -> Iterator[Any]:
    """All equations of a program, nested ones included."""
    for eqn in program.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: isinstance(v, (Jaxpr, ClosedJaxpr))):
            if isinstance(value, (Jaxpr, ClosedJaxpr)):
                yield from equations(getattr(value, "jaxpr", value))


def rewritten_equations(function: Callable[..., Any], *args: Any, platform: str = "cpu") -> list[Any]:
    return list(equations(jax.make_jaxpr(rewrite_function(function, platform))(*args).jaxpr))


def primitives(function: Callable[..., Any], *args: Any, platform: str = "cpu") -> list[str]:
    return [eqn.primitive.name for eqn in rewritten_equations(function, *args, platform=platform)]


def called_kernels(function: Callable[..., Any], *args: Any) -> list[str]:
    text = jax.jit(rewrite_function(function, "cpu")).lower(*args).as_text()
    return sorted(re.findall(r"@(unisono_\w*)", text))


def ours(function: Callable[..., Any], *args: Any) -> Any:
    """What a program of the engine computes."""
    return jax.jit(rewrite_function(function, "cpu"), compiler_options=get_compiler_options("cpu"))(*args)


def both(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    return jax.jit(function)(*args), ours(function, *args)


def assert_close(plain: Any, other: Any, tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest element, since elements near zero are differences of large ones."""
    for a, b in pair_leaves(plain, other):
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * max(np.abs(a).max(initial=0), 1e-30))


def assert_close_sums(plain: Any, other: Any, of_sizes: Any, roundings: int = 4) -> None:
    """Within a few roundings of each sum without signs, `of_sizes`: terms that cancel are rounded as they are."""
    for (a, b), size in zip(pair_leaves(plain, other), jax.tree.leaves(of_sizes), strict=True):
        assert (np.abs(b - a) <= roundings * np.finfo("float32").eps * np.asarray(size, "float64")).all()


def pair_leaves(plain: Any, other: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pair the arrays of two results, which have the same structure, shapes and dtypes."""
    assert jax.tree.structure(plain) == jax.tree.structure(other)
    pairs = list(zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True))
    for a, b in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
    return [(np.asarray(a, "float64"), np.asarray(b, "float64")) for a, b in pairs]


def assert_same(plain: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, plain, other)


def assert_same_within_rounding(function: Callable[..., Any], *args: Any) -> None:
    plain, native = jax.jit(function)(*args), jax.jit(rewrite_function(function, "cpu"))(*args)
    assert_close(plain, native)


def value_and_vjp(function: Callable[..., Any]) -> Callable[..., Any]:
    def step(dy: Any, *args: Any) -> Any:
        y, pull = jax.vjp(function, *args)
        return y, pull(dy(y) if callable(dy) else dy)

    return step


def build_layer(layer: Any, *shape: int) -> tuple[list[Any], list[Any]]:
    """Build a layer for rows of this shape; return the values of its trained variables, and of the others."""
    layer.build((None, *shape))
    return [v.value for v in layer.trainable_variables], [v.value for v in layer.non_trainable_variables]


def differentiate(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (x, scale, offset, gradients by the results) that returns the results and the gradients."""

    @jax.jit
    def run(x: Any, scale: Any, offset: Any, *by_results: Any) -> Any:
        results, pull = jax.vjp(lambda *args: tuple(jax.tree.leaves(function(*args))), x, scale, offset)
        return *results, *pull(by_results)

    return run


def make_step(
    layer: Any, row_shape: tuple[int, ...], activation: Callable[[Any], Any] = lambda y: y, shift: float = 0.0, **takes: Any
) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, Any]]:
    """Return a training step of a layer, as replicas take it, one of plain Keras, and their arguments, for nine rows."""
    weights, state = build_layer(layer, *row_shape)
    weights = [normal(value.shape, number) for number, value in enumerate(weights)]
    x, by_y = jax.numpy.asarray(normal((9, *row_shape), 10) + shift, layer.compute_dtype), normal((9, *row_shape), 11)

    def loss(weights: Any, x: Any) -> Any:
        y, new_state = layer.stateless_call(weights, state, x, **takes)
        y = activation(y).astype("float32")
        return (y * by_y).sum(), (y, new_state)

    def step(weights: Any, x: Any, prepare: Callable[..., Any] = lambda function: function) -> Any:
        return jax.value_and_grad(prepare(loss), (0, 1), has_aux=True)(weights, x)

    return lambda weights, x: step(weights, x, rewrite_before_gradient), step, (weights, x)


def assert_step_close(ours: Callable[..., Any], plain: Callable[..., Any], args: Any, tolerance: float = 1e-5) -> None:
    """A step, rewritten, and one of plain Keras."""
    results = (jax.tree.leaves(jax.jit(f)(*args)) for f in (rewrite_function(ours, "cpu"), plain))
    for found, expected in zip(*results, strict=True):
        found, expected = np.asarray(found, "float32"), np.asarray(expected, "float32")
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def assert_penalty_is_that_of_keras(
    layer: Any, rows: int, power: Callable[[Any], Any], kernel: str | None = None, **takes: Any
) -> None:
    """A gradient of a gradient, as a penalty of gradients has it: the inner one is taken before the kernels are put in."""
    weights, state = build_layer(layer, 32)
    weights, x = [normal((32,), 1), normal((32,), 2)], normal((rows, 32))

    def penalty(weights: Any, x: Any) -> Any:
        of_x = jax.grad(lambda x: power(layer.stateless_call(weights, state, x, **takes)[0]).sum())(x)
        return (of_x**2).sum()

    def gradient(prepare: Callable[..., Any]) -> Callable[..., Any]:
        return lambda weights, x: jax.grad(prepare(penalty), (0, 1))(weights, x)

    assert kernel is None or kernel in called_kernels(gradient(rewrite_before_gradient), weights, x)
    assert_step_close(gradient(rewrite_before_gradient), gradient(lambda f: f), (weights, x), 1e-4)


def as_it_is(traced: Any) -> Any:
    """Return a program with the rewrites for CPU; the same object where none applies."""
    return Rewriter(functools.partial(find_replacement, CPU))(traced)
