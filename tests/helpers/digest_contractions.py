"""Prints digests of products, convolutions and sums, plain and rewritten, as this process' pool of threads computes them."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unisono._src.kernels.rewriting import rewrite_function

rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), "float32")


def convolution(stride, padding):
    def convolution(x, w):
        return lax.conv_general_dilated(x, w, (stride,) * (x.ndim - 2), padding, dimension_numbers=LAYOUTS[x.ndim - 2])

    return convolution


LAYOUTS = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
CASES = {
    "dense": (jnp.matmul, normal(2048, 64), normal(64, 10)),
    "dense of three dimensions": (lambda x, w: jnp.einsum("bsd,de->bse", x, w), normal(8, 300, 24), normal(24, 33)),
    "attention": (lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), normal(2, 200, 2, 9), normal(2, 200, 2, 9)),
    "transposed": (lambda a, b: a.T @ b, normal(5000, 7), normal(5000, 31)),
    "conv of 8 to 8": (convolution(1, "SAME"), normal(4, 16, 16, 8), normal(3, 3, 8, 8)),
    "conv of 3 to 16, stride 2": (convolution(2, "SAME"), normal(8, 32, 32, 3), normal(7, 7, 3, 16)),
    "conv of 2 to 48, valid": (convolution(1, "VALID"), normal(16, 18, 18, 2), normal(7, 7, 2, 48)),
    "conv of 5 to 1": (convolution(1, "VALID"), normal(7, 58, 58, 5), normal(5, 5, 5, 1)),
    "conv of 16 to 24 that reads much, valid": (convolution(1, "VALID"), normal(2, 34, 34, 16), normal(3, 3, 16, 24)),
    "conv of 3 to 64, its gradient in pieces": (convolution(1, "SAME"), normal(20, 32, 32, 3), normal(3, 3, 3, 64)),
    "conv of 64 to 64, in halves": (convolution(1, "SAME"), normal(17, 32, 32, 64), normal(3, 3, 64, 64)),
    "conv1d": (convolution(1, "SAME"), normal(8, 200, 9), normal(5, 9, 12)),
    "sum of a batch": (lambda x, z: jnp.sum(x * z, (0, 1, 2)), normal(16, 32, 32, 64), normal(16, 32, 32, 64)),
    "sum of all": (lambda x, z: jnp.sum(x**2 + z), normal(65537), normal(65537)),
    "variance of sentences": (lambda x, z: jnp.var(x, (0, 1)) * z, normal(16, 300, 70), normal(70)),
    "variance of rows": (lambda x, z: jnp.var(x, 1) * z, normal(5, 70000), normal(5)),
    "sum of wide rows": (lambda x, z: jnp.sum(x, 0) * z, normal(400, 5000), normal(5000)),
    "dense with many rows": (lambda x, w: jax.nn.relu(x @ w + w[0]), normal(2000, 300), normal(300, 200)),
    "dense with long sums": (lambda x, w: x @ w + w[0], normal(1500, 1030), normal(1030, 250)),
    "conv3d": (convolution(2, "SAME"), normal(4, 12, 12, 12, 3), normal(3, 3, 3, 3, 8)),
}


def digests(case, wrap):
    function, *args = case

    def step(*args):
        y, pull = jax.vjp(function, *args)
        return y, *pull(jnp.cos(y))

    return [hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:8] for value in jax.jit(wrap(step))(*args)]


if __name__ == "__main__":
    wraps = {"plain": lambda step: step, "rewritten": lambda step: rewrite_function(step, "cpu")}
    print(json.dumps({how: {name: digests(case, wrap) for name, case in CASES.items()} for how, wrap in wraps.items()}))
