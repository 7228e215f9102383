"""A process of its own: prints a digest of each of many single operations and their gradients, as the engine's programs compute them.

python digest_operations.py SEED COUNT FIRST DEVICES: what is drawn depends on the seed alone, whatever the number of threads, of which
CPU devices make some.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unisono._src.engine.xla import runtime
from unisono._src.engine.xla.programs import DeviceProgram
from unisono._src.kernels.before_gradient import rewrite_before_gradient
from unisono._src.kernels.rewriting import rewrite_function

DTYPES = ("float32", "float32", "float32", "bfloat16", "float16")
MOST = 10**7


class Draw:
    """Random choices of one case."""

    def __init__(self, *seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def of(self, *values: Any) -> Any:
        return values[self.random.integers(len(values))]

    def size(self, least: int, most: int) -> int:
        """Small ones as often as large ones."""
        return int(np.exp(self.random.uniform(np.log(least), np.log(most + 1))))

    def shape(self, rank: int, most: int) -> tuple[int, ...]:
        left, sizes = most, []
        for _ in range(rank):
            sizes.append(self.size(1, max(1, min(left, 5000))))
            left //= sizes[-1]
        self.random.shuffle(sizes)
        return tuple(sizes)

    def axes(self, rank: int) -> tuple[int, ...]:
        chosen = [axis for axis in range(rank) if self.random.random() < 0.6]
        return tuple(chosen or [int(self.random.integers(rank))])

    def array(self, shape: tuple[int, ...], dtype: str | None = None) -> Any:
        return jnp.asarray(self.random.standard_normal(shape, "float32"), dtype or self.of(*DTYPES))


Case = tuple[str, Callable[..., Any], list[Any]]


def reduction(draw: Draw) -> Case:
    rank = draw.of(1, 2, 3, 4, 5)
    shape, axes = draw.shape(rank, draw.size(10, MOST)), draw.axes(rank)
    x = draw.array(shape)
    kinds: dict[str, Callable[[Any], Any]] = {
        "sum": lambda x: jnp.sum(x, axes),
        "mean": lambda x: jnp.mean(x, axes),
        "var": lambda x: jnp.var(x, axes),
        "sum of squares": lambda x: jnp.sum(x * x, axes),
        "norm": lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype("float32")), axes)),
        "max": lambda x: jnp.max(x, axes),
        "logsumexp": lambda x: jax.nn.logsumexp(x, axes),
        "softmax": lambda x: jax.nn.softmax(x, axes),
        "sum of exp": lambda x: jnp.sum(jnp.exp(x) + 1, axes),
        "masked sum": lambda x: jnp.sum(jnp.where(x > 0, x, 0), axes),
        "standardized": lambda x: (x - jnp.mean(x, axes, keepdims=True)) * lax.rsqrt(jnp.var(x, axes, keepdims=True) + 1e-3),
        "transposed sum": lambda x: jnp.sum(x.T, axes),
    }
    kind = draw.of(*kinds)
    return f"{kind} of {x.dtype}{shape} over {axes}", kinds[kind], [x]


def product(draw: Draw) -> Case:
    dtype = draw.of(*DTYPES[:4])
    rows, length, columns = (draw.size(1, 3000) for _ in range(3))
    while rows * length * columns > 2e9:
        rows, length, columns = (max(1, n // 2) for n in (rows, length, columns))
    form = draw.of(
        "ij,jk->ik", "ji,jk->ik", "ij,kj->ik", "ji,kj->ik", "bij,bjk->bik", "bij,bkj->bik", "bij,jk->bik", "bihd,bjhd->bhij"
    )
    sizes = {"i": rows, "j": length, "k": columns, "b": draw.size(1, 12), "h": draw.size(1, 4), "d": draw.size(1, 64)}
    if "h" in form:
        sizes |= {"i": min(rows, 300), "j": min(length, 300)}
    if "b" in form:
        sizes |= {name: min(n, 400) for name, n in sizes.items()}
    left, right = (tuple(sizes[name] for name in part) for part in form.split("->")[0].split(","))
    return (
        f"{form} of {dtype}{left}{right}",
        lambda a, b: jnp.einsum(form, a, b),
        [draw.array(left, dtype), draw.array(right, dtype)],
    )


LAYOUTS = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def convolution(draw: Draw) -> Case:
    space = draw.of(1, 2, 2, 2, 3)
    size = {1: draw.size(4, 300), 2: draw.size(4, 40), 3: draw.size(3, 12)}[space]
    kernel, stride, dilation = draw.of(1, 2, 3, 3, 5, 7), draw.of(1, 1, 2, 3), 1
    if stride == 1:
        dilation = draw.of(1, 1, 1, 2)
    groups = draw.of(1, 1, 1, 1, 2, 0)
    ins, outs = draw.size(1, 48), draw.size(1, 64)
    if groups == 0:  # depthwise
        groups, outs = ins, ins * draw.of(1, 2)
    ins, outs = -(-ins // groups) * groups, -(-outs // groups) * groups
    shape = (draw.size(1, 24), *[size] * space, ins)
    dtype = draw.of(*DTYPES)
    padding = draw.of("SAME", "VALID") if (kernel - 1) * dilation < size else "SAME"
    bias = draw.of(True, False)
    name = f"conv of {dtype}{shape}, {kernel} to {outs}, stride {stride}, dilation {dilation}, groups {groups}, {padding}"

    def convolved(x: Any, w: Any, b: Any) -> Any:
        y = lax.conv_general_dilated(
            x,
            w,
            (stride,) * space,
            padding,
            rhs_dilation=(dilation,) * space,
            dimension_numbers=LAYOUTS[space],
            feature_group_count=groups,
        )
        return jax.nn.relu(y + b) if bias else y

    return (
        name,
        convolved,
        [draw.array(shape, dtype), draw.array(((kernel,) * space) + (ins // groups, outs), dtype), draw.array((outs,), dtype)],
    )


def pool(draw: Draw) -> Case:
    shape = draw.size(1, 16), draw.size(4, 40), draw.size(4, 40), draw.size(1, 64)
    size = draw.of(2, 3)
    stride = draw.of(1, 2, 3)
    x = draw.array(shape)
    padding = draw.of("SAME", "VALID")
    kind = draw.of("max", "average")
    window = (1, size, size, 1)
    steps = (1, stride, stride, 1)

    def pooled(x: Any) -> Any:
        if kind == "max":
            return lax.reduce_window(x, -jnp.inf, lax.max, window, steps, padding)
        return lax.reduce_window(x, 0.0, lax.add, window, steps, padding) / size**2

    return f"{kind} pool of {x.dtype}{shape}, {size} by {stride}, {padding}", pooled, [x]


def order(draw: Draw) -> Case:
    shape = draw.shape(2, draw.size(10, 10**6))
    x = draw.array(shape)
    kinds: dict[str, Callable[[Any], Any]] = {
        "sort": lambda x: jnp.sort(x, -1),
        "cumsum": lambda x: jnp.cumsum(x, 0),
        "cumprod": lambda x: jnp.cumprod(1 + x / 1000, -1),
        "top": lambda x: lax.top_k(x, min(3, x.shape[-1]))[0],
        "scan": lambda x: lax.scan(lambda c, row: (jnp.tanh(c + row), jnp.sum(c)), jnp.zeros_like(x[0]), x)[1],
        "segments": lambda x: jax.ops.segment_sum(x, jnp.arange(len(x)) % 7, 7),
        "taken": lambda x: x[jnp.arange(3 * len(x)) * 7 % len(x)],
    }
    kind = draw.of(*kinds)
    return f"{kind} of {x.dtype}{shape}", kinds[kind], [x]


def transform(draw: Draw) -> Case:
    shape = (draw.size(1, 8), draw.size(1, 100), draw.of(draw.size(2, 5000), 2 ** draw.size(1, 12)))
    kinds: dict[str, Callable[[Any], Any]] = {
        "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
        "fft2": lambda x: jnp.fft.fft2(x).real,
        "ifftn": lambda x: jnp.fft.ifftn(x).imag,
        "rfft2": lambda x: jnp.fft.rfft2(x).imag,
        "irfftn": lambda x: jnp.fft.irfftn(x + 0j),
    }
    kind = draw.of(*kinds)
    return f"{kind} of {shape}", kinds[kind], [draw.array(shape, "float32")]


def algebra(draw: Draw) -> Case:
    x = draw.array((draw.size(1, 600),) * 2, "float32")
    kinds: dict[str, Callable[[Any], Any]] = {
        "solution": lambda x: jnp.linalg.solve(x, jnp.ones_like(x)),
        "triangular solution": lambda x: jax.scipy.linalg.solve_triangular(jnp.tril(x) + 9 * jnp.eye(len(x)), jnp.ones_like(x)),
        "cholesky": lambda x: jnp.linalg.cholesky(x @ x.T + len(x) * jnp.eye(len(x))),
        "qr": lambda x: jnp.linalg.qr(x)[0],
        "eigenvalues": lambda x: jnp.linalg.eigvalsh(x + x.T),
        "singular values": lambda x: jnp.linalg.svd(x, compute_uv=False),
    }
    kind = draw.of(*kinds)
    return f"{kind} of {x.shape}", kinds[kind], [x]


def attention(draw: Draw) -> Case:
    batch, heads, depth = draw.size(1, 12), draw.size(1, 8), draw.size(1, 80)
    queries, keys = draw.size(1, 300), draw.size(1, 600)
    dtype = draw.of("float32", "float32", "float32", "bfloat16")
    shared = draw.of(1, 1, 2)  # heads that have the same keys
    hidden = draw.array((batch, 1, 1, keys), "float32") > 0.7
    is_causal = draw.of(True, False)
    bias = draw.of(True, False)
    name = f"attention of {dtype}, {batch} x {queries} by {keys} x {heads * shared} of {heads} x {depth}, causal {is_causal}, bias {bias}"

    def attended(q: Any, k: Any, v: Any, b: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, bias=b if bias else None, mask=~hidden, is_causal=is_causal)

    rows = [(queries, heads * shared), (keys, heads), (keys, heads)]
    return name, attended, [
        *(draw.array((batch, *lengths, depth), dtype) for lengths in rows),
        draw.array((1, heads * shared, 1, keys), dtype),
    ]  # fmt: skip


def recurrence(draw: Draw) -> Case:
    steps, rows, ins, width = draw.size(1, 40), draw.size(1, 100), draw.size(1, 40), draw.size(1, 80)
    gated = draw.of(True, False)

    def step(w: Any, u: Any, h: Any, x: Any) -> tuple[Any, Any]:
        z = x @ w + h @ u
        kept = jax.nn.sigmoid(z) if gated else 0.0
        h = kept * h + (1 - kept) * jnp.tanh(z)
        return h, h

    def run(x: Any, w: Any, u: Any) -> Any:
        return lax.scan(functools.partial(step, w, u), jnp.zeros((rows, width)), x)[1]

    shapes = (steps, rows, ins), (ins, width), (width, width)
    name = f"recurrence of {steps} x {rows} x {ins} to {width}, gated {gated}"
    return name, run, [draw.array(shape, "float32") / 4 for shape in shapes]


KINDS = (reduction, reduction, product, convolution, convolution, pool, order, transform, algebra, attention, recurrence)


def digests(case: Case) -> str:
    _, function, args = case

    def step(*args: Any) -> Any:
        y, pull = jax.vjp(rewrite_before_gradient(function), *args)
        return y, *pull(jnp.cos(y.astype("float32")).astype(y.dtype))

    device = jax.devices()[0]
    values = DeviceProgram(rewrite_function(step, device.platform))(device, case[0], *args)
    return " ".join(hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:8] for value in values)


def digests_of(seed: int, count: int, first: int) -> dict[str, str]:
    """The digests of so many operations, by what they are."""
    found = {}
    for number in range(first, first + count):
        draw = Draw(seed, number)
        case = draw.of(*KINDS)(draw)
        found[f"{number}: {case[0]}"] = digests(case)
    return found


if __name__ == "__main__":
    runtime.use_one_thread()  # as a strategy does
    *words, devices = map(int, sys.argv[1:])
    jax.config.update("jax_num_cpu_devices", devices)
    print(json.dumps(digests_of(*words)))
