"""The rules of each platform: they say which equations are replaced."""

from __future__ import annotations

from collections.abc import Mapping

from jax.extend.core import JaxprEqn

from unisono._src.xla.rewrite import contraction, convolution, fourier, pooling, reduction
from unisono._src.xla.rewrite.equations import Producers, Replacement, Rule

Rules = Mapping[str, Rule]
"""By the primitive's name."""

CPU: Rules = {
    "dot_general": contraction.replace_product,
    "conv_general_dilated": convolution.replace_convolution,
    "transpose": contraction.replace_transposed_product,
    "fft": fourier.replace_fourier_transform,
    "reduce_sum": reduction.replace_reduction,
    "reduce_max": reduction.replace_reduction,
    "reduce_min": reduction.replace_reduction,
    "reduce_window_max": pooling.replace_pooling,
    "reduce_window_min": pooling.replace_pooling,
    "reduce_window_sum": pooling.replace_pooling,
    "select_and_scatter_add": pooling.replace_max_gradient,
}
GPU: Rules = {"select_and_scatter_add": pooling.replace_max_gradient_without_overlap}
BY_PLATFORM: Mapping[str, Rules] = {"cpu": CPU, "gpu": GPU, "cuda": GPU, "rocm": GPU}
DTYPES = ("float32", "bfloat16", "float16")
DTYPES_BY_PRIMITIVE = {"fft": ("float32", "float64", "complex64", "complex128")}
"""Dtypes of the primitives that do not have `DTYPES`."""


def select_rules(platform: str) -> Rules:
    return BY_PLATFORM.get(platform, {})


def find_replacement(rules: Rules, eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Return the replacement of an equation; None if it has no rule, has a type without fast code on XLA:CPU, or is empty."""
    name = eqn.primitive.name
    rule = rules.get(name)
    dtypes = DTYPES_BY_PRIMITIVE.get(name, DTYPES)
    if rule is None or any(atom.aval.dtype.name not in dtypes or atom.aval.size == 0 for atom in [*eqn.invars, *eqn.outvars]):
        return None
    return rule(eqn, made_by)
