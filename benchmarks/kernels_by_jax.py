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
from timing import measure_seconds

from unisono._src.engine.xla.determinism import get_compiler_options
from unisono._src.kernels.before_gradient import rewrite_before_gradient
from unisono._src.kernels.rewriting import rewrite_function

LAYOUT = ("NHWC", "HWIO", "NHWC")


def draw_normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, dtype="float32"))


def compile_rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(rewrite_function(function, "cpu"), compiler_options=get_compiler_options("cpu"))


def make_linear(case: Case) -> Callable[[jax.Array, jax.Array], jax.Array]:
    if case.kind == "product":
        return jnp.matmul
    groups = case.x[-1] // case.kernel[2]
    strides = (case.stride, case.stride)
    return lambda x, w: lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=LAYOUT, feature_group_count=groups)


def linear_calls(case: Case) -> dict[str, Callable[[], Any]]:
    """Return a call of each part: a gradient is that of the operation alone, for a given gradient of its result."""
    function = make_linear(case)
    x = draw_normal(*case.x)
    w = draw_normal(*case.kernel)
    back = draw_normal(*jax.eval_shape(function, x, w).shape)
    by_input = compile_rewritten(lambda x, w, back: jax.vjp(lambda x: function(x, w), x)[1](back)[0])
    by_kernel = compile_rewritten(lambda x, w, back: jax.vjp(lambda w: function(x, w), w)[1](back)[0])
    forward = compile_rewritten(function)
    return {
        "forward": lambda: forward(x, w),
        "by the input": lambda: by_input(x, w, back),
        "by the kernel": lambda: by_kernel(x, w, back),
    }


def make_whole(case: Case) -> tuple[Callable[..., jax.Array], Any]:
    """Return a function of several arrays, and these."""
    if case.kind == "attention":
        return jax.nn.dot_product_attention, tuple(draw_normal(*case.x) for _ in range(3))
    layers = keras.layers
    kinds = {
        "LSTM": layers.LSTM,
        "GRU": layers.GRU,
        "normalization": layers.LayerNormalization,
        "batch normalization": layers.BatchNormalization,
    }
    layer = kinds[case.kind](*case.kernel)
    x = draw_normal(*case.x)
    layer.build(x.shape)
    weights = [variable.value for variable in layer.trainable_variables]
    others = [variable.value for variable in layer.non_trainable_variables]
    if case.kind == "batch normalization":
        return lambda x, weights: jax.nn.relu(layer.stateless_call(weights, others, x, training=True)[0]), (x, weights)
    return lambda x, weights: layer.stateless_call(weights, others, x)[0], (x, weights)


def whole_calls(case: Case) -> dict[str, Callable[[], Any]]:
    function, arrays = make_whole(case)

    def loss(arrays: Any) -> jax.Array:
        return (function(*arrays) ** 2).sum()

    forward = compile_rewritten(function)
    both = compile_rewritten(lambda arrays: jax.value_and_grad(rewrite_before_gradient(loss))(arrays))
    return {WHOLE[0]: lambda: forward(*arrays), WHOLE[1]: lambda: both(arrays)}


def list_calls(case: Case) -> dict[str, Callable[[], Any]]:
    return whole_calls(case) if case.parts == WHOLE else linear_calls(case)


def finish_call(call: Callable[[], Any]) -> None:
    jax.block_until_ready(call())


def main() -> None:
    seconds: dict[str, dict[str, float]] = {}
    for name, case in CASES.items():
        if not sys.argv[1:] or any(part in name for part in sys.argv[1:]):
            seconds[name] = {
                part: measure_seconds(functools.partial(finish_call, call))
                for part, call in list_calls(case).items()
                if part in case.parts
            }
    square = draw_normal(SQUARE, SQUARE)
    multiply = compile_rewritten(jnp.matmul)
    seconds["square"] = {"forward": measure_seconds(lambda: finish_call(lambda: multiply(square, square)))}
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
