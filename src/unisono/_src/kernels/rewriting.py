"""The rewrites of each platform: which equations are replaced, and by what."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from unisono._src.kernels.before_gradient import put_kernels, trace_for
from unisono._src.kernels.convolution import convolution, native_epilogue, pooling
from unisono._src.kernels.loops import loops, native_loop
from unisono._src.kernels.loops.residuals import recompute_residuals
from unisono._src.kernels.products import contraction, fourier, native_gradients, reduction
from unisono._src.programs.equations import Producers, Replacement, Rewrite, Rewriter

P = ParamSpec("P")
T = TypeVar("T")

Rewrites = Mapping[str, Rewrite]
"""By the primitive's name."""

BITS: Rewrites = {
    "dot_general": contraction.replace_product,
    "conv_general_dilated": convolution.replace_convolution,
    "transpose": contraction.replace_transposed_product,
    "fft": fourier.replace_fourier_transform,
}
"""On CPU, what would have other bits under another number of threads. Without these the promise breaks; most of them gain time, too."""
SPEED: Rewrites = {
    "add": native_epilogue.replace_biased_sum,
    "max": native_epilogue.replace_rectifier,
    "custom_jvp_call": native_epilogue.replace_rectifier,
    "jit": native_epilogue.replace_rectifier,
    "reduce_sum": reduction.replace_reduction,
    "reduce_max": reduction.replace_reduction,
    "reduce_min": reduction.replace_reduction,
    "reduce_window_max": pooling.replace_pooling,
    "reduce_window_min": pooling.replace_pooling,
    "reduce_window_sum": pooling.replace_pooling,
    "reshape": pooling.replace_flattening,
    "scan": native_loop.replace_loop,
    "select_and_scatter_add": pooling.replace_max_gradient,
    "select_n": native_epilogue.replace_gated_product,
}
"""On CPU, what is only faster in another form. Each may go, and no placement differs from another."""
CPU: Rewrites = {**BITS, **SPEED}
CPU_LOOPS: Rewrites = {"scan": loops.hoist_products}
"""Those of loops, applied first: what leaves a loop is then put into other forms too."""
GPU: Rewrites = {"select_and_scatter_add": pooling.replace_max_gradient_without_overlap}
BY_PLATFORM: Mapping[str, Rewrites] = {"cpu": CPU, "gpu": GPU, "cuda": GPU, "rocm": GPU}
DTYPES = ("float32", "bfloat16", "float16")
DTYPES_BY_PRIMITIVE = {
    "fft": ("float32", "float64", "complex64", "complex128"),
    "scan": ("float32", "bool"),
    "select_n": ("float32", "bool"),
}
"""Dtypes of the primitives that do not have `DTYPES`."""


trace_observers: list[Callable[[str, ClosedJaxpr], None]] = []
"""Called with the name of each function and its jaxpr as it was traced, before equations are replaced. An audit reads jaxprs so."""


def rewrite_function(
    function: Callable[P, T], platform: str, note_traced: Callable[[ClosedJaxpr], None] | None = None
) -> Callable[P, T]:
    """Rewrite `function` into the forms that XLA runs fast on `platform`. Under `jax.jit`, this costs no time at run time.

    The function is traced as it is and its equations are replaced afterwards, so it should be differentiated already:
    `rewritten(jax.grad(loss), "cpu")`, where `jax.grad(rewritten(loss, "cpu"))` would miss the gradients. `note_traced` is called
    with the jaxpr as it was traced.

    >>> total = rewrite_function(lambda x: x.sum(), "cpu")
    >>> float(jax.jit(total)(jax.numpy.ones(3)))
    3.0
    """
    find = functools.partial(find_replacement, BY_PLATFORM.get(platform, {}))
    is_on_cpu = platform == "cpu"
    find_in_loops = functools.partial(find_loop_replacement, CPU_LOOPS if is_on_cpu else {})
    rewrite = Rewriter(
        find,
        prepare=native_epilogue.compare_rectified if is_on_cpu else None,
        join=native_gradients.join_gradients if is_on_cpu else None,
    )
    rewrite_loops = Rewriter(find_in_loops, prepare=recompute_residuals if is_on_cpu else None)

    @functools.wraps(function)
    def with_replacements(*args: P.args, **kwargs: P.kwargs) -> T:
        traced, out = trace_as_rewritten(function, platform)(*args, **kwargs)
        if any(isinstance(const, Tracer) for const in traced.consts):
            # An array from inside of the differentiated function is used outside of it. JAX allows it where the array does not depend
            # on the weights, but not if the inside was traced by itself.
            traced, out = jax.make_jaxpr(functools.partial(function), return_shape=True)(*args, **kwargs)
        if note_traced is not None:
            note_traced(traced)
        for observe in trace_observers:
            observe(getattr(function, "__name__", ""), traced)
        if is_on_cpu:  # what is only computed forward
            traced = put_kernels(traced)
        run = jaxpr_as_fun(rewrite(rewrite_loops(traced)))
        return jax.tree.unflatten(jax.tree.structure(out), run(*jax.tree.leaves((args, kwargs))))

    return with_replacements


def trace_as_rewritten(function: Callable[P, T], platform: str) -> Callable[P, tuple[ClosedJaxpr, T]]:
    """Build a function that traces `function` as `rewrite_function` does. It gives the jaxpr, and the result in shapes.

    JAX caches the traces of jitted functions: one that is traced so, and then called in a program that is rewritten, is traced
    once.
    """

    @functools.wraps(function)
    def trace(*args: P.args, **kwargs: P.kwargs) -> tuple[ClosedJaxpr, T]:
        with trace_for(platform):
            return jax.make_jaxpr(function, axis_env=[(platform, 1)], return_shape=True)(*args, **kwargs)

    return trace


def find_replacement(rewrites: Rewrites, eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Find the replacement of an equation.

    None if it has no rewrite, has a dtype without fast code on XLA:CPU, or is empty.
    """
    name = eqn.primitive.name
    rewrite = rewrites.get(name)
    dtypes = DTYPES_BY_PRIMITIVE.get(name, DTYPES)
    if rewrite is None or any(atom.aval.dtype.name not in dtypes or atom.aval.size == 0 for atom in [*eqn.invars, *eqn.outvars]):
        return None
    return rewrite(eqn, made_by)


def find_loop_replacement(rewrites: Rewrites, eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Find the replacement of a loop, if it has a rewrite."""
    rewrite = rewrites.get(eqn.primitive.name)
    return rewrite(eqn, made_by) if rewrite else None
