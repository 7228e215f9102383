"""Functions with random numbers that are the same for every row, for the runs of a probe.

A probe measures on parts of some rows and on all of them whether a number is a sum or a mean over rows. Random numbers would differ each time,
and hide it. With fixed draws a row gives the same wherever it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from unisono._src.operands import get_type
from unisono._src.replica.marks import find_compared_values, find_factors
from unisono._src.replica.protocol import State
from unisono._src.typed_jax import jaxpr_as_fun, jit, make_jaxpr_and_shape
from unisono._src.typing import Array, PyTree, Shape
from unisono._src.xla.rewrite.equations import Producers, Replacement, Rewriter

T = TypeVar("T")

LOOPS = ("while",)
"""Loops in which draws stay random. A loop that draws until a condition holds would never end with fixed draws."""


class SteadyFunction(Generic[T]):
    """A function of a state and rows, compiled for each shape of rows with random draws that are the same for every row."""

    def __init__(self, function: Callable[..., T], eager: bool) -> None:
        """`eager`: the function is called as it is."""
        self._function = function
        self._eager = eager
        self._compiled: dict[object, tuple[Callable[..., list[Array]], PyTree]] = {}
        """For each kind of arguments, the compiled function, and the shapes of what it returns."""
        self.compared_values: dict[int, set[float]] = {}
        """The numbers that it compares the arrays of its rows with, by the arrays' positions."""
        self.factors: set[float] = set()
        """The numbers by which it multiplies or divides, whatever the number of rows."""

    def __call__(self, state: State, rows: PyTree, *more: PyTree) -> T:
        args = state, rows, *more
        if self._eager:
            return self._function(*args)
        leaves = jax.tree.leaves(args)
        kind = jax.tree.structure(args), tuple((np.shape(leaf), str(leaf.dtype)) for leaf in leaves)
        if kind not in self._compiled:
            traced, out = make_jaxpr_and_shape(self._function)(*args)
            before = len(jax.tree.leaves(state))
            places = range(before, before + len(jax.tree.leaves(rows)))
            self.compared_values = {place - before: values for place, values in find_compared_values(traced, places).items()}
            new_factors = find_factors(traced)
            self.factors = new_factors & self.factors if self._compiled else new_factors
            self._compiled[kind] = jit(jaxpr_as_fun(Rewriter(replace_draw, LOOPS)(traced))), out
        run, out = self._compiled[kind]
        return jax.tree.unflatten(jax.tree.structure(out), run(*leaves))


def hold_draws(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function with random draws that are the same for every row. Code that cannot be traced draws as it does."""

    def call(*args: PyTree) -> T:
        try:
            traced, out = make_jaxpr_and_shape(function)(*args)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            return function(*args)
        run = jaxpr_as_fun(Rewriter(replace_draw, LOOPS)(traced))
        return jax.tree.unflatten(jax.tree.structure(out), run(*jax.tree.leaves(args)))

    return call


def replace_draw(eqn: JaxprEqn, _: Producers) -> Replacement | None:
    """Return fixed bits in place of random ones: the same for each row, along the first axis."""
    if eqn.primitive.name != "random_bits":
        return None
    bits = get_type(eqn.outvars[0])

    def fixed_bits(_: Array) -> Array:
        return jnp.broadcast_to(mix_bits(bits.shape[1:]).astype(bits.dtype), bits.shape)

    return Replacement(fixed_bits, eqn.invars)


def mix_bits(shape: Shape) -> Array:
    """Return 32 bits for each element, which look random."""
    bits = lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(0x9E3779B9) + jnp.uint32(0x7F4A7C15)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return (bits ^ (bits >> 16)).reshape(shape)
