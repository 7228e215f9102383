"""Contractions whose bits do not depend on the number of threads.

XLA:CPU computes most matmuls and convolutions with YNNPACK, whose bits are the same for every number of threads, and the others
with Eigen. Eigen cuts a long contraction with a small result by the number of threads. It cuts a large result into blocks by that
number too, and adds in another order at their edges. So a matmul that Eigen would compute is brought to a form that YNNPACK
takes, which is no slower. Native kernels take matmuls that YNNPACK needs a transpose for, and others that they compute faster:
see `native_product`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from jax import Array, lax
from jax.extend.core import JaxprEqn

from unisono._src.kernels.products.native_product import find_native_product
from unisono._src.programs.equations import Params, Producers, Replacement
from unisono._src.programs.operands import get_shape
from unisono._src.typing import Shape

Axes = tuple[int, ...]

LEAST_SIZE = 8
"""YNNPACK takes a matmul if one of its dimensions has this many elements; XLA compiles smaller ones to loops."""

LEAST_GAIN = 2
"""The result of a transposed matmul must be this many times larger than what is moved to avoid the transpose."""


class Operand(NamedTuple):
    """An operand of a matmul, with its contracted and batch dimensions."""

    shape: Shape
    contracted: Axes
    batch: Axes

    @property
    def free(self) -> Axes:
        """The dimensions that the other operand does not have."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in (*self.contracted, *self.batch))

    @property
    def order(self) -> Axes:
        """The dimensions, with the contracted ones last."""
        return (*self.batch, *self.free, *self.contracted)

    def volume(self, axes: Axes) -> int:
        """The number of elements in these dimensions."""
        return math.prod(self.shape[axis] for axis in axes)


class Product(NamedTuple):
    """A matmul (`dot_general`).

    Its dimensions are the batch dimensions, then the free ones of `left`, then the free ones of `right`.
    """

    left: Operand
    right: Operand
    params: Params

    @classmethod
    def from_equation(cls, eqn: JaxprEqn) -> Product:
        (contracted, contracted_of_right), (batch, batch_of_right) = eqn.params["dimension_numbers"]
        left, right = map(get_shape, eqn.invars)
        return cls(Operand(left, contracted, batch), Operand(right, contracted_of_right, batch_of_right), eqn.params)

    @property
    def is_left_to_xla(self) -> bool:
        """Whether XLA's own code is good enough.

        One operand is a vector, for which XLA has code that no thread count cuts, or all sizes are small.
        """
        rows = self.left.volume(self.left.free)
        columns = self.right.volume(self.right.free)
        is_small = max(rows, columns, self.left.volume(self.left.contracted)) < LEAST_SIZE
        return min(rows, columns) == 1 or is_small or self.params["out_sharding"] is not None

    @property
    def result_size(self) -> int:
        """The number of elements of the result."""
        return self.left.volume((*self.left.batch, *self.left.free)) * self.right.volume(self.right.free)

    @property
    def moved_size(self) -> int:
        """The number of elements that `compute` brings into another order."""
        is_in_order = self.left.order == tuple(range(len(self.left.shape)))
        return 0 if is_in_order else math.prod(self.left.shape)

    def swap(self) -> Product:
        """Swap the operands. The last two groups of the result's dimensions change places."""
        return Product(self.right, self.left, self.params)

    def compute(self, left: Array, right: Array) -> Array:
        """Multiply, with the left operand's contracted dimensions moved last.

        The barriers are needed: XLA would fold a transpose of an operand, or of the result, into the matmul, and so undo it.
        """
        left = lax.optimization_barrier(lax.transpose(left, self.left.order))
        contracted = tuple(range(left.ndim - len(self.left.contracted), left.ndim))
        batch = tuple(range(len(self.left.batch)))
        numbers = ((contracted, self.right.contracted), (batch, self.right.batch))
        y = lax.dot_general(left, right, numbers, self.params["precision"], self.params["preferred_element_type"])
        return lax.optimization_barrier(y)

    def permutation_to_swapped(self) -> Axes:
        """The permutation from this result's dimensions to the swapped one's."""
        batch = len(self.left.batch)
        right = batch + len(self.left.free)
        return (*range(batch), *range(right, right + len(self.right.free)), *range(batch, right))


def replace_product(eqn: JaxprEqn, _: Producers) -> Replacement | None:
    """Replace a matmul by one that YNNPACK takes. It requires that the left operand's contracted dimensions are the last.

    The gradient by a Dense layer's kernel, for example, is contracted over other dimensions.
    """
    product = Product.from_equation(eqn)
    if product.is_left_to_xla:
        return None
    return Replacement(find_native_form(product, eqn) or arrange_for_ynnpack(product), eqn.invars)


def replace_transposed_product(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Replace a transposed matmul by one with the operands swapped.

    JAX's gradients have them. It is done if it moves far fewer elements. XLA often fuses the transpose with what reads it, for
    example an optimizer's update. So the transpose costs less than its size says.
    """
    maker = find_swapped_product(eqn, made_by)
    if maker is None:
        return None
    product = Product.from_equation(maker)
    swapped = product.swap()
    native = find_native_form(swapped, maker)
    if native is not None:
        return Replacement(lambda left, right: native(right, left), maker.invars)
    if LEAST_GAIN * swapped.moved_size > product.result_size:
        return None
    compute = arrange_for_ynnpack(swapped)
    return Replacement(lambda left, right: compute(right, left), maker.invars)


def find_swapped_product(eqn: JaxprEqn, made_by: Producers) -> JaxprEqn | None:
    """Find the matmul whose operands a transpose swaps. None if anything else reads the matmul."""
    maker = made_by.find_if_read_once(eqn.invars[0])
    if maker is None or maker.primitive.name != "dot_general":
        return None
    product = Product.from_equation(maker)
    is_swapped = tuple(eqn.params["permutation"]) == product.permutation_to_swapped()
    return maker if is_swapped and not product.is_left_to_xla else None


def find_native_form(product: Product, eqn: JaxprEqn) -> Callable[[Array, Array], Array] | None:
    """Find the native kernel's function for a matmul, if there is one."""
    if product.left.batch:
        return None
    shapes = product.left.shape, product.right.shape
    contracted = tuple(product.left.contracted), tuple(product.right.contracted)
    return find_native_product(shapes, contracted, {atom.aval.dtype.name for atom in [*eqn.invars, *eqn.outvars]})


def arrange_for_ynnpack(product: Product) -> Callable[[Array, Array], Array]:
    """Build a function that computes a matmul as YNNPACK requires. The operands are swapped if that moves fewer elements."""
    other = product.swap()
    if product.moved_size <= other.moved_size + product.result_size:
        return product.compute
    return lambda left, right: lax.transpose(other.compute(right, left), other.permutation_to_swapped())
