"""Which equations are replaced on which platform."""

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
OF_PRIMITIVE = {"fft": ("float32", "float64", "complex64", "complex128")}
"""Where they are others than `DTYPES`."""


def rules_for(platform: str) -> Rules:
    return BY_PLATFORM.get(platform, {})


def replacement(rules: Rules, eqn: JaxprEqn, made_by: MadeBy) -> Replacement | None:
    """Return None where `eqn` stays: it has no rule, is not of a float type that XLA:CPU has fast code for, or is empty."""
    name = eqn.primitive.name
    rule = rules.get(name)
    dtypes = OF_PRIMITIVE.get(name, DTYPES)
    if rule is None or any(v.aval.dtype.name not in dtypes or v.aval.size == 0 for v in [*eqn.invars, *eqn.outvars]):
        return None
    return rule(eqn, made_by)
