"""Random numbers that are the same for every row, for steps that are only looked at.

Whether a number is a sum or a mean over rows is measured on parts of some rows and on all of them. Drawn numbers would be others each time,
and hide it. With steady ones a row gives the same wherever it stands.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from unisono._src.xla.rewrite.equations import MadeBy, Replacement
from unisono._src.xla.rewrite.replace import Rewriter

LOOPS = ("while",)
"""A loop that draws until it likes what it has drawn would never end."""


def with_steady_draws(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return a traced program in which every random draw gives each row, along the first axis, the same bits."""
    return Rewriter(rule, LOOPS)(program)


def rule(eqn: JaxprEqn, _: MadeBy) -> Replacement | None:
    """Return steady bits in place of random ones."""
    if eqn.primitive.name != "random_bits":
        return None
    bits: Any = eqn.outvars[0].aval

    def steady(_: Any) -> Any:
        return jnp.broadcast_to(mixed(bits.shape[1:]).astype(bits.dtype), bits.shape)

    return Replacement(steady, eqn.invars)


def mixed(shape: tuple[int, ...]) -> Any:
    """Return 32 bits for each place, which look drawn."""
    bits = lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(0x9E3779B9) + jnp.uint32(0x7F4A7C15)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return (bits ^ (bits >> 16)).reshape(shape)
