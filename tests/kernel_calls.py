"""What the tests of native kernels share: which kernels a program calls, and whether it computes what XLA computes."""

from __future__ import annotations

import re

import jax
import numpy as np

from unisono._src.xla.rewrite import rewrite_function


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def called_kernels(function, *args):
    text = jax.jit(rewrite_function(function, "cpu")).lower(*args).as_text()
    return sorted(re.findall(r"@(unisono_\w*)", text))


def assert_same_within_rounding(function, *args):
    ours, plain = (jax.tree.leaves(jax.jit(f)(*args)) for f in (rewrite_function(function, "cpu"), function))
    for native, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(native, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
