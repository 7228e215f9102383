"""Seconds of each operation in the programs that `fit` runs: with native kernels, or without them under UNISONO_NATIVE=0.

python benchmarks/kernels_by_jax.py [PART OF A NAME ...]
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import unisono  # noqa: F401  (before JAX starts: it sets the options of XLA)

# isort: split
import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from kernel_cases import CASES, SQUARE, WHOLE, Case
from timing import seconds_of

from unisono._src.xla.determinism import get_compiler_options
from unisono._src.xla.rewrite import rewrite_before_gradient, rewrite_function

LAYOUT = ("NHWC", "HWIO", "NHWC")


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, dtype="float32"))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(rewrite_function(function, "cpu"), compiler_options=get_compiler_options("cpu"))


def linear(case: Case) -> Callable[[jax.Array, jax.Array], jax.Array]:
    if case.kind == "product":
        return jnp.matmul
    groups = case.x[-1] // case.kernel[2]
    strides = (case.stride, case.stride)
    return lambda x, w: lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=LAYOUT, feature_group_count=groups)


def linear_calls(case: Case) -> dict[str, Callable[[], Any]]:
    """Return a call of each part: a gradient is that of the operation alone, for a given gradient of its result."""
    function, x, w = linear(case), normal(*case.x), normal(*case.kernel)
    back = normal(*jax.eval_shape(function, x, w).shape)
    by_input = compiled(lambda x, w, back: jax.vjp(lambda x: function(x, w), x)[1](back)[0])
    by_kernel = compiled(lambda x, w, back: jax.vjp(lambda w: function(x, w), w)[1](back)[0])
    forward = compiled(function)
    return {
        "forward": lambda: forward(x, w),
        "by the input": lambda: by_input(x, w, back),
        "by the kernel": lambda: by_kernel(x, w, back),
    }


def whole(case: Case) -> tuple[Callable[..., jax.Array], Any]:
    """Return a function of several arrays, and these."""
    if case.kind == "attention":
        return jax.nn.dot_product_attention, tuple(normal(*case.x) for _ in range(3))
    layer = {"LSTM": keras.layers.LSTM, "GRU": keras.layers.GRU}[case.kind](*case.kernel)
    x = normal(*case.x)
    layer.build(x.shape)
    weights = [variable.value for variable in layer.trainable_variables]
    others = [variable.value for variable in layer.non_trainable_variables]
    return lambda x, weights: layer.stateless_call(weights, others, x)[0], (x, weights)


def whole_calls(case: Case) -> dict[str, Callable[[], Any]]:
    function, arrays = whole(case)

    def loss(arrays: Any) -> jax.Array:
        return (function(*arrays) ** 2).sum()

    forward = compiled(function)
    both = compiled(lambda arrays: jax.value_and_grad(rewrite_before_gradient(loss))(arrays))
    return {WHOLE[0]: lambda: forward(*arrays), WHOLE[1]: lambda: both(arrays)}


def calls_of(case: Case) -> dict[str, Callable[[], Any]]:
    return whole_calls(case) if case.parts == WHOLE else linear_calls(case)


def finished(call: Callable[[], Any]) -> None:
    jax.block_until_ready(call())


def main() -> None:
    found: dict[str, dict[str, float]] = {}
    for name, case in CASES.items():
        if not sys.argv[1:] or any(part in name for part in sys.argv[1:]):
            found[name] = {
                part: seconds_of(functools.partial(finished, call)) for part, call in calls_of(case).items() if part in case.parts
            }
    square, multiply = normal(SQUARE, SQUARE), compiled(jnp.matmul)
    found["square"] = {"forward": seconds_of(lambda: finished(lambda: multiply(square, square)))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
