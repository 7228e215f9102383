"""Rewriting while a program is traced, before the gradient is taken.

It puts in kernels that bring a gradient of their own, and shortens loops.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar, cast

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from unisono._src.kernels.layers.attention import replace_attention
from unisono._src.kernels.layers.batch_normalization import replace_batch_normalization
from unisono._src.kernels.layers.normalization import replace_normalization
from unisono._src.kernels.loops.last_results import read_last_results_from_carries
from unisono._src.kernels.native.library import load_kernels
from unisono._src.programs.equations import Producers, Replacement, Rewriter
from unisono._src.programs.inlining import inline_short_calls
from unisono._src.typing import PyTree

P = ParamSpec("P")
T = TypeVar("T")

LEFT_UNDIFFERENTIATED = ("custom_jvp_call", "custom_vjp_call")
"""Primitives with gradients of their own: their nested jaxprs are not differentiated."""

_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)
"""The platform for which a program is traced."""


@contextlib.contextmanager
def trace_for(platform: str) -> Iterator[None]:
    """Tell `rewrite_before_gradient` the platform.

    JAX caches the traces of functions, such as bodies of loops. So a program is traced with an axis that has the platform's name
    and that nothing uses: then JAX does not take a trace that was made elsewhere.
    """
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def uses_kernels() -> bool:
    """Whether the program being traced will call native kernels. It will where `rewrite_function` traces it for CPUs."""
    return _platform.get() == "cpu" and load_kernels().level is not None


def rewrite_before_gradient(function: Callable[P, T]) -> Callable[P, T]:
    """Put kernels with their own gradients into a function.

    Its gradient is taken next. They are put in where `rewrite_function` traces a program for CPUs; elsewhere the function stays
    as it is.
    """
    if not uses_kernels():
        return function

    def call_with(arguments: PyTree) -> T:
        args, kwargs = arguments
        return cast(Callable[..., T], function)(*args, **kwargs)

    @functools.wraps(function)
    def with_kernels(*args: P.args, **kwargs: P.kwargs) -> T:
        leaves, tree = jax.tree.flatten((args, kwargs))
        results: list[tuple[PyTree, list[bool], list[object]]] = []

        def compute_arrays(*leaves: jax.Array) -> list[jax.Array]:
            values, result = jax.tree.flatten(call_with(jax.tree.unflatten(tree, leaves)))
            is_array = [isinstance(value, jax.Array) for value in values]
            results.append((result, is_array, values))
            return [value for known, value in zip(is_array, values, strict=True) if known]

        traced, is_needed = read_last_results_from_carries(jax.make_jaxpr(compute_arrays)(*leaves))
        needed = itertools.compress(leaves, is_needed)
        arrays = iter(jaxpr_as_fun(put_kernels(traced))(*needed))
        result, is_array, values = results.pop()
        return jax.tree.unflatten(
            result, [next(arrays) if known else value for known, value in zip(is_array, values, strict=True)]
        )

    return with_kernels


def put_kernels(program: ClosedJaxpr) -> ClosedJaxpr:
    """Put native kernels for attention and normalizations into a jaxpr."""
    return Rewriter(find_kernel, LEFT_UNDIFFERENTIATED, inline_short_calls)(program)


def find_kernel(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    rewrites = replace_attention, replace_normalization, replace_batch_normalization
    return next(filter(None, (rewrite(eqn, made_by) for rewrite in rewrites)), None)
