"""The rules of each platform: they say which equations are replaced."""

from __future__ import annotations

from collections.abc import Mapping

from jax.extend.core import JaxprEqn

from unisono._src.xla.rewrite import contraction, convolution, fourier, pooling, reduction
from unisono._src.xla.rewrite.equations import MadeBy, Replacement, Rule

Rules = Mapping[str, Rule]
"""By the primitive's name."""

CPU: Rules = {
    "dot_general": contraction.rule,
    "conv_general_dilated": convolution.rule,
    "transpose": contraction.transpose_rule,
    "fft": fourier.rule,
    "reduce_sum": reduction.rule,
    "reduce_max": reduction.rule,
    "reduce_min": reduction.rule,
    "reduce_window_max": pooling.rule,
    "reduce_window_min": pooling.rule,
    "reduce_window_sum": pooling.rule,
    "select_and_scatter_add": pooling.max_gradient_rule,
}
GPU: Rules = {"select_and_scatter_add": pooling.max_gradient_rule_without_overlap}
BY_PLATFORM: Mapping[str, Rules] = {"cpu": CPU, "gpu": GPU, "cuda": GPU, "rocm": GPU}
DTYPES = ("float32", "bfloat16", "float16")
DTYPES_BY_PRIMITIVE = {"fft": ("float32", "float64", "complex64", "complex128")}
"""Dtypes of the primitives that do not have `DTYPES`."""


def rules_for(platform: str) -> Rules:
    return BY_PLATFORM.get(platform, {})


def replacement(rules: Rules, eqn: JaxprEqn, made_by: MadeBy) -> Replacement | None:
    """Return the replacement of an equation; None if it has no rule, has a type without fast code on XLA:CPU, or is empty."""
    name = eqn.primitive.name
    rule = rules.get(name)
    dtypes = DTYPES_BY_PRIMITIVE.get(name, DTYPES)
    if rule is None or any(atom.aval.dtype.name not in dtypes or atom.aval.size == 0 for atom in [*eqn.invars, *eqn.outvars]):
        return None
    return rule(eqn, made_by)
