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

from unisono.xla.rewrite.equations import MadeBy, Replacement, shape
from unisono.xla.rewrite.window import Shape

Axes = tuple[int, ...]

LEAST = 8
"""YNNPACK takes a product of which one dimension has so many elements; of smaller ones XLA makes loops of its own."""


class Product(NamedTuple):
    """A product whose dimensions are those of the batch, then those of `left` alone, then those of `right` alone."""

    params: Mapping[str, Any]
    left: Shape
    right: Shape

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Product:
        return cls(eqn.params, *map(shape, eqn.invars))

    @property
    def free_of_left(self) -> Axes:
        (contracted, _), (batch, _) = self.params["dimension_numbers"]
        return free(self.left, contracted, batch)

    @property
    def free_of_right(self) -> Axes:
        (_, contracted), (_, batch) = self.params["dimension_numbers"]
        return free(self.right, contracted, batch)

    @property
    def is_left_to_xla(self) -> bool:
        """Whether one operand is a vector, for which XLA has code that nobody cuts, or all is small."""
        (contracted, _), _ = self.params["dimension_numbers"]
        rows, columns = volume(self.left, self.free_of_left), volume(self.right, self.free_of_right)
        is_small = max(rows, columns, volume(self.left, contracted)) < LEAST
        return min(rows, columns) == 1 or is_small or self.params["out_sharding"] is not None

    @property
    def results(self) -> int:
        (contracted, _), _ = self.params["dimension_numbers"]
        return math.prod(self.left) // volume(self.left, contracted) * volume(self.right, self.free_of_right)

    @property
    def moved(self) -> int:
        """How many elements are brought into another order before `computed`."""
        (contracted, _), (batch, _) = self.params["dimension_numbers"]
        is_last = (*batch, *self.free_of_left, *contracted) == tuple(range(len(self.left)))
        return 0 if is_last else math.prod(self.left)

    def swapped(self) -> Product:
        """Return the product of the operands the other way round: the last two groups of its dimensions change places."""
        contracted, batch = self.params["dimension_numbers"]
        return Product({**self.params, "dimension_numbers": (contracted[::-1], batch[::-1])}, self.right, self.left)

    def computed(self, left: Array, right: Array) -> Array:
        """Return the product, of the left operand with the contracted dimensions behind all others.

        The barriers are for all: XLA would fold a transpose of an operand, or of the result, into the product, and so undo it.
        """
        (contracted, of_right), (batch, batch_of_right) = self.params["dimension_numbers"]
        outside = (*batch, *self.free_of_left)
        left = lax.optimization_barrier(lax.transpose(left, (*outside, *contracted)))
        numbers = ((tuple(range(len(outside), left.ndim)), of_right), (tuple(range(len(batch))), batch_of_right))
        y = lax.dot_general(left, right, numbers, self.params["precision"], self.params["preferred_element_type"])
        return lax.optimization_barrier(y)

    def behind_each_other(self) -> tuple[int, ...]:
        """Return the permutation that puts the dimensions of `right` alone before those of `left` alone."""
        _, (batch, _) = self.params["dimension_numbers"]
        ahead, behind = len(batch), len(batch) + len(self.free_of_left)
        return (*range(ahead), *range(behind, behind + len(self.free_of_right)), *range(ahead, behind))


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
    if product.is_left_to_xla or tuple(eqn.params["permutation"]) != product.behind_each_other():
        return None
    compute = as_ynnpack_takes_it(product.swapped())
    return Replacement(lambda left, right: compute(right, left), maker.invars)


def as_ynnpack_takes_it(product: Product) -> Callable[[Array, Array], Array]:
    """Return what computes a product as YNNPACK takes it: as it is, or the other way round where less is brought into another order."""
    other = product.swapped()
    if product.moved <= other.moved + product.results:
        return product.computed
    return lambda left, right: lax.transpose(other.computed(right, left), other.behind_each_other())


def volume(of: Shape, axes: Axes) -> int:
    return math.prod(of[axis] for axis in axes)


def free(of: Shape, contracted: Axes, batch: Axes) -> Axes:
    return tuple(axis for axis in range(len(of)) if axis not in (*contracted, *batch))
