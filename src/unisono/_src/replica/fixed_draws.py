"""Random numbers that are the same for every row, for the runs of a probe.

A probe measures on parts of some rows and on all of them whether a number is a sum or a mean over rows. Random numbers would differ each time,
and hide it. With fixed draws a row gives the same wherever it stands.
"""

from __future__ import annotations

import math
from typing import cast

import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn

from unisono._src.typing import Array, Shape
from unisono._src.xla.rewrite.equations import Producers, Replacement, Rewriter

LOOPS = ("while",)
"""Loops in which draws stay random. A loop that draws until a condition holds would never end with fixed draws."""


def fix_draws(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return a traced program in which every random draw gives each row, along the first axis, the same bits."""
    return Rewriter(replace_draw, LOOPS)(program)


def replace_draw(eqn: JaxprEqn, _: Producers) -> Replacement | None:
    """Return fixed bits in place of random ones."""
    if eqn.primitive.name != "random_bits":
        return None
    bits = cast(ShapedArray, eqn.outvars[0].aval)

    def fixed_bits(_: Array) -> Array:
        return jnp.broadcast_to(mix_bits(bits.shape[1:]).astype(bits.dtype), bits.shape)

    return Replacement(fixed_bits, eqn.invars)


def mix_bits(shape: Shape) -> Array:
    """Return 32 bits for each element, which look random."""
    bits = lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(0x9E3779B9) + jnp.uint32(0x7F4A7C15)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return (bits ^ (bits >> 16)).reshape(shape)
