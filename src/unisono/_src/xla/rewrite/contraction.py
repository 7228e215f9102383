"""Contractions whose bits do not depend on the number of threads.

XLA:CPU computes most products and convolutions with YNNPACK, whose bits are the same for every pool of threads, and the
others with Eigen. Eigen cuts a long contraction with a small result by the number of threads, and a large result in blocks by it, at
whose edges it adds in another order. So what Eigen would take is brought to a form that YNNPACK takes, which is no slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax import Array, lax
from jax.extend.core import JaxprEqn

from unisono._src.xla.rewrite.equations import MadeBy, Replacement, shape
from unisono._src.xla.rewrite.window import Shape

Axes = tuple[int, ...]

LEAST = 8
"""YNNPACK takes a product of which one dimension has so many elements; of smaller ones XLA makes loops of its own."""


class Operand(NamedTuple):
    """An operand of a product: its shape, and which of its dimensions are contracted, and which are the batch's."""

    shape: Shape
    contracted: Axes
    batch: Axes

    @property
    def alone(self) -> Axes:
        """The dimensions that the other operand has not."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in (*self.contracted, *self.batch))

    @property
    def order(self) -> Axes:
        """Its dimensions with the contracted ones behind all others."""
        return (*self.batch, *self.alone, *self.contracted)

    def volume(self, axes: Axes) -> int:
        """Return how many elements these dimensions have."""
        return math.prod(self.shape[axis] for axis in axes)


class Product(NamedTuple):
    """A product whose dimensions are those of the batch, then those of `left` alone, then those of `right` alone."""

    left: Operand
    right: Operand
    params: Mapping[str, Any]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Product:
        (of_left, of_right), (batch, batch_of_right) = eqn.params["dimension_numbers"]
        left, right = map(shape, eqn.invars)
        return cls(Operand(left, of_left, batch), Operand(right, of_right, batch_of_right), eqn.params)

    @property
    def is_left_to_xla(self) -> bool:
        """Whether one operand is a vector, for which XLA has code that nobody cuts, or all is small."""
        rows = self.left.volume(self.left.alone)
        columns = self.right.volume(self.right.alone)
        is_small = max(rows, columns, self.left.volume(self.left.contracted)) < LEAST
        return min(rows, columns) == 1 or is_small or self.params["out_sharding"] is not None

    @property
    def results(self) -> int:
        """How many elements it has."""
        return self.left.volume((*self.left.batch, *self.left.alone)) * self.right.volume(self.right.alone)

    @property
    def moved(self) -> int:
        """How many elements `computed` brings into another order."""
        is_in_order = self.left.order == tuple(range(len(self.left.shape)))
        return 0 if is_in_order else math.prod(self.left.shape)

    def swapped(self) -> Product:
        """Return the product of the operands the other way round: the last two groups of its dimensions change places."""
        return Product(self.right, self.left, self.params)

    def computed(self, left: Array, right: Array) -> Array:
        """Return the product, of the left operand with the contracted dimensions behind all others.

        The barriers are for all: XLA would fold a transpose of an operand, or of the result, into the product, and so undo it.
        """
        left = lax.optimization_barrier(lax.transpose(left, self.left.order))
        contracted = tuple(range(left.ndim - len(self.left.contracted), left.ndim))
        batch = tuple(range(len(self.left.batch)))
        numbers = ((contracted, self.right.contracted), (batch, self.right.batch))
        y = lax.dot_general(left, right, numbers, self.params["precision"], self.params["preferred_element_type"])
        return lax.optimization_barrier(y)

    def permutation_of_swapped(self) -> Axes:
        """Return the permutation of dimensions that makes of this product the swapped one."""
        batch = len(self.left.batch)
        of_right = batch + len(self.left.alone)
        return (*range(batch), *range(of_right, of_right + len(self.right.alone)), *range(batch, of_right))


def rule(eqn: JaxprEqn, _: MadeBy) -> Replacement | None:
    """Replace a product by one whose left operand is contracted over its last dimensions, as YNNPACK takes it.

    The gradients by a Dense layer's kernel are others.
    """
    product = Product.of(eqn)
    return None if product.is_left_to_xla else Replacement(as_ynnpack_takes_it(product), eqn.invars)


def transpose_rule(eqn: JaxprEqn, made_by: MadeBy) -> Replacement | None:
    """Replace a transposed product, which JAX's gradients are, by the product of the operands the other way round."""
    maker = made_by.of_once_read(eqn.invars[0])
    if maker is None or maker.primitive.name != "dot_general":
        return None
    product = Product.of(maker)
    if product.is_left_to_xla or tuple(eqn.params["permutation"]) != product.permutation_of_swapped():
        return None
    compute = as_ynnpack_takes_it(product.swapped())
    return Replacement(lambda left, right: compute(right, left), maker.invars)


def as_ynnpack_takes_it(product: Product) -> Callable[[Array, Array], Array]:
    """Return what computes a product as YNNPACK takes it: as it is, or the other way round where less is brought into another order."""
    other = product.swapped()
    if product.moved <= other.moved + product.results:
        return product.computed
    return lambda left, right: lax.transpose(other.computed(right, left), other.permutation_of_swapped())
