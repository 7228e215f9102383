"""What the tests of rewritten programs share: their equations, the native kernels that they call, and whether they compute what XLA computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from unisono._src.native.library import load_kernels
from unisono._src.xla.determinism import get_compiler_options
from unisono._src.xla.rewrite import rewrite_function

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
    assert jax.tree.structure(plain) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * max(np.abs(a).max(initial=0), 1e-30))


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
