"""Measures the rewrites of `unisono._src.kernels` on CPU, for each kind of convolution and pooling.

python benchmarks/rewrites.py [PART OF A NAME ...]

For one shard of eight (the slow ones are measured with one), in ms: value and gradients (by the input, and by the kernel) in
a loop as JAX writes them, outside any loop as JAX writes them, and in a loop rewritten. Medians; the loop has a traced trip
count, as accumulation has.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unisono._src.kernels.rewriting import rewrite_function

SHARDS = 8
LAYOUTS = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
Function = Callable[..., Any]
Case = tuple[Function, tuple[int, ...], tuple[int, ...]]
"""A function of an input and a kernel, and their shapes."""


def conv(x: tuple[int, ...], kernel: tuple[int, ...], stride: int = 1, padding: str = "SAME", **kwargs: Any) -> Case:
    space = len(x) - 2
    kwargs |= {"dimension_numbers": LAYOUTS[space]}
    return lambda x, w: lax.conv_general_dilated(x, w, (stride,) * space, padding, **kwargs), x, kernel


def transposed(x: tuple[int, ...], kernel: tuple[int, ...], stride: int) -> Case:
    space = len(x) - 2
    numbers = LAYOUTS[space]
    return lambda x, w: lax.conv_transpose(x, w, (stride,) * space, "SAME", dimension_numbers=numbers), x, kernel


def separable(x: tuple[int, ...], features: int) -> Case:
    ins = x[-1]

    def layer(x: Any, w: Any) -> Any:
        depth = w[:, :, None, :ins]
        y = lax.conv_general_dilated(x, depth, (1, 1), "SAME", dimension_numbers=LAYOUTS[2], feature_group_count=ins)
        point = w.reshape(-1)[: ins * features].reshape(1, 1, ins, features)
        return lax.conv_general_dilated(y, point, (1, 1), "SAME", dimension_numbers=LAYOUTS[2])

    return layer, x, (3, 3, ins * features)


def pool(x: tuple[int, ...], kind: str, size: int, stride: int, padding: str) -> Case:
    window = (1, *[size] * (len(x) - 2), 1)
    strides = (1, *[stride] * (len(x) - 2), 1)

    def layer(x: Any, w: Any) -> Any:
        x = jax.nn.relu(x * w)  # a layer before it
        if kind == "max":
            return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)
        counts = lax.reduce_window(jnp.ones(x.shape[1:-1])[None, ..., None], 0.0, lax.add, window, strides, padding)
        return lax.reduce_window(x, 0.0, lax.add, window, strides, padding) / counts

    return layer, x, (x[-1],)


CASES: dict[str, Case] = {
    "conv 3x3 of 64 to 64": conv((16, 32, 32, 64), (3, 3, 64, 64)),
    "conv 3x3 of 128 to 128": conv((16, 16, 16, 128), (3, 3, 128, 128)),
    "conv 3x3 of 256 to 256": conv((16, 8, 8, 256), (3, 3, 256, 256)),
    "conv 3x3 of 64 to 64, no padding": conv((16, 34, 34, 64), (3, 3, 64, 64), padding="VALID"),
    "conv 3x3 of 32 to 64, no padding": conv((64, 13, 13, 32), (3, 3, 32, 64), padding="VALID"),
    "conv 3x3 of 64 to 64, 128 rows": conv((128, 32, 32, 64), (3, 3, 64, 64)),
    "conv 3x3 of 256 to 256, 128 rows": conv((128, 14, 14, 256), (3, 3, 256, 256)),
    "conv 3x3 of 3 to 64": conv((16, 32, 32, 3), (3, 3, 3, 64)),
    "conv 3x3 of 1 to 32": conv((16, 28, 28, 1), (3, 3, 1, 32)),
    "conv 3x3 of 8 to 8": conv((4, 16, 16, 8), (3, 3, 8, 8)),
    "conv 1x1 of 64 to 256": conv((16, 16, 16, 64), (1, 1, 64, 256)),
    "conv 1x1 stride 2": conv((16, 16, 16, 64), (1, 1, 64, 128), 2),
    "conv 3x3 stride 2": conv((16, 32, 32, 64), (3, 3, 64, 128), 2),
    "conv 3x3 stride 2 of 3 to 32": conv((16, 64, 64, 3), (3, 3, 3, 32), 2),
    "conv 7x7 stride 2 of 3 to 64": conv((4, 96, 96, 3), (7, 7, 3, 64), 2),
    "conv 8x8 stride 8 (patches)": conv((16, 64, 64, 3), (8, 8, 3, 128), 8, "VALID"),
    "conv 3x3 dilation 2": conv((16, 32, 32, 32), (3, 3, 32, 64), rhs_dilation=(2, 2)),
    "conv 5x5 on 4x4": conv((16, 4, 4, 64), (5, 5, 64, 64)),
    "transposed 3x3 stride 2": transposed((16, 16, 16, 64), (3, 3, 64, 32), 2),
    "transposed 4x4 stride 2": transposed((16, 16, 16, 64), (4, 4, 64, 32), 2),
    "transposed 2x2 stride 2": transposed((16, 16, 16, 64), (2, 2, 64, 32), 2),
    "grouped 3x3, 4 groups of 16": conv((16, 16, 16, 64), (3, 3, 16, 64), feature_group_count=4),
    "grouped 3x3, 32 groups of 4": conv((16, 16, 16, 128), (3, 3, 4, 128), feature_group_count=32),
    "grouped 3x3 stride 2, 8 groups": conv((16, 16, 16, 64), (3, 3, 8, 64), 2, feature_group_count=8),
    "grouped 3x3, 128 groups of 4": conv((16, 8, 8, 512), (3, 3, 4, 512), feature_group_count=128),
    "depthwise 3x3": conv((16, 32, 32, 64), (3, 3, 1, 64), feature_group_count=64),
    "depthwise 3x3 stride 2": conv((16, 32, 32, 64), (3, 3, 1, 64), 2, feature_group_count=64),
    "depthwise 7x7": conv((4, 16, 16, 64), (7, 7, 1, 64), feature_group_count=64),
    "depthwise 3x3 multiplier 2": conv((16, 32, 32, 64), (3, 3, 1, 128), feature_group_count=64),
    "separable 3x3": separable((16, 32, 32, 64), 64),
    "conv1d 5 of 64 to 128": conv((16, 128, 64), (5, 64, 128)),
    "conv1d 3 stride 2": conv((16, 128, 64), (3, 64, 128), 2),
    "conv1d 3 dilation 4": conv((16, 128, 32), (3, 32, 32), rhs_dilation=(4,)),
    "depthwise conv1d 5": conv((16, 128, 64), (5, 1, 64), feature_group_count=64),
    "transposed conv1d 4 stride 2": transposed((16, 64, 64), (4, 64, 64), 2),
    "conv3d 3x3x3 of 16 to 32": conv((4, 12, 16, 16, 16), (3, 3, 3, 16, 32)),
    "conv3d 3x3x3 stride 2": conv((4, 12, 16, 16, 16), (3, 3, 3, 16, 32), 2),
    "transposed conv3d 2x2x2 stride 2": transposed((4, 6, 8, 8, 32), (2, 2, 2, 32, 16), 2),
    "max pool 2x2": pool((16, 32, 32, 64), "max", 2, 2, "VALID"),
    "max pool 2x2 of odd size, same": pool((16, 33, 33, 32), "max", 2, 2, "SAME"),
    "max pool 3x3 stride 2": pool((16, 32, 32, 64), "max", 3, 2, "SAME"),
    "max pool 3x3 stride 1": pool((16, 16, 16, 64), "max", 3, 1, "SAME"),
    "max pool 5x5 stride 1": pool((16, 16, 16, 64), "max", 5, 1, "SAME"),
    "max pool 8x8 stride 8": pool((16, 32, 32, 64), "max", 8, 8, "VALID"),
    "max pool 1d 2": pool((16, 128, 64), "max", 2, 2, "VALID"),
    "max pool 3d 2": pool((4, 16, 16, 16, 32), "max", 2, 2, "VALID"),
    "average pool 2x2": pool((16, 32, 32, 64), "average", 2, 2, "VALID"),
    "average pool 3x3 stride 2": pool((16, 32, 32, 64), "average", 3, 2, "SAME"),
    "average pool 3x3 stride 1": pool((16, 16, 16, 64), "average", 3, 1, "SAME"),
    "average pool 1d 2": pool((16, 128, 64), "average", 2, 2, "VALID"),
    "average pool 7x7 stride 2": pool((16, 16, 16, 64), "average", 7, 2, "SAME"),
    "average pool 8x8 (global)": pool((16, 8, 8, 256), "average", 8, 8, "VALID"),
}


def step_of(layer: Function) -> Function:
    def loss(x: Any, w: Any) -> Any:
        return jnp.mean(layer(x, w) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))


def loop_of(step: Function) -> Function:
    def loop(count: Any, x: Any, w: Any) -> Any:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(step, x[0], w))
        return lax.fori_loop(0, count, lambda i, total: jax.tree.map(jnp.add, total, step(x[i], w)), zeros)

    return loop


def measure_median(function: Function, *args: Any, most: float = 1.0) -> float:
    """Return the median of 3 to 20 calls, of about `most` seconds together."""
    jax.block_until_ready(function(*args))
    times: list[float] = []
    while len(times) < 3 or (sum(times) < most and len(times) < 20):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_case(layer: Function, x_shape: tuple[int, ...], w_shape: tuple[int, ...]) -> tuple[float, float, float]:
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (SHARDS, *x_shape))
    w = jax.random.normal(keys[1], w_shape)
    step = step_of(layer)
    loop = loop_of(step)
    plain_loop = jax.jit(loop)
    slow = measure_median(plain_loop, 1, x, w, most=0) > 0.1
    return (
        measure_median(plain_loop, 1, x, w, most=0) if slow else measure_median(plain_loop, SHARDS, x, w) / SHARDS,
        measure_median(jax.jit(step), x[0], w),
        measure_median(jax.jit(rewrite_function(loop, "cpu")), SHARDS, x, w) / SHARDS,
    )


def main() -> None:
    wanted = sys.argv[1:]
    print(f"{'':34}{'plain, loop':>12}{'plain':>10}{'rewritten, loop':>17}")
    for name, case in CASES.items():
        if not wanted or any(part in name for part in wanted):
            plain_loop, plain, loop = (1e3 * each for each in measure_case(*case))
            print(f"{name:34}{plain_loop:12.2f}{plain:10.2f}{loop:17.2f}", flush=True)


if __name__ == "__main__":
    main()
