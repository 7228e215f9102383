"""Join gradients that sum over the same rows in one kernel call.

The gradients by a layer's kernel, by its recurrent kernel and by its bias all read the gradient by the layer's result. One call
reads it once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from unisono._src.kernels.native.products import call_transposed_product
from unisono._src.kernels.products.contraction import Product, find_swapped_product
from unisono._src.kernels.products.native_product import flatten_rows, is_for_gradient_kernel
from unisono._src.programs.equations import Producers, Replacement, make_call
from unisono._src.programs.operands import get_dtype, get_shape


class Gradient(NamedTuple):
    """A gradient that sums an array over its first dimensions.

    The array is summed itself, or multiplied with another array first.
    """

    equations: tuple[JaxprEqn, ...]
    """The equations that compute it; the last one makes the result."""
    right: Var
    summed: int
    """The number of dimensions summed over."""
    left: Var | None = None
    """The array with which `right` is multiplied; None for the gradient by a bias."""

    @property
    def start(self) -> Var:
        """The result of the first equation."""
        return self.equations[0].outvars[0]

    @property
    def result(self) -> Var:
        return self.equations[-1].outvars[0]


def join_gradients(program: Jaxpr) -> Jaxpr:
    """Rewrite gradients that sum over the same rows to one call."""
    by_rows: dict[tuple[Var, int], list[Gradient]] = {}
    for gradient in find_gradients(program):
        by_rows.setdefault((gradient.right, gradient.summed), []).append(gradient)
    made_at = {variable: place for place, eqn in enumerate(program.eqns) for variable in eqn.outvars}
    calls: dict[int, JaxprEqn] = {}
    left_out: set[int] = set()
    for gradients in by_rows.values():
        joined = choose_gradients(gradients, made_at)
        if joined:
            first = min(joined, key=lambda gradient: made_at[gradient.start]).equations[0]
            calls[id(first)] = make_joined_call(joined, first)
            left_out.update(id(eqn) for gradient in joined for eqn in gradient.equations)
    if not calls:
        return program
    return program.replace(eqns=[calls.get(id(eqn), eqn) for eqn in program.eqns if id(eqn) in calls or id(eqn) not in left_out])


def find_gradients(program: Jaxpr) -> Iterator[Gradient]:
    """Yield the gradients that the kernel can compute, in the jaxpr's order.

    They are gradients by kernels, and sums over first dimensions.
    """
    made_by = Producers(program)
    transposes = {
        id(product): eqn
        for eqn in program.eqns
        if eqn.primitive.name == "transpose" and (product := find_swapped_product(eqn, made_by)) is not None
    }
    for eqn in program.eqns:
        if eqn.primitive.name == "dot_general" and has_floats(eqn):
            gradient = read_product(eqn, transposes.get(id(eqn)))
        elif eqn.primitive.name == "reduce_sum" and has_floats(eqn):
            gradient = read_sum_over_rows(eqn)
        else:
            continue
        if gradient is not None:
            yield gradient


def has_floats(eqn: JaxprEqn) -> bool:
    """Whether all operands and results are non-empty float32 variables."""
    atoms = [*eqn.invars, *eqn.outvars]
    return all(isinstance(atom, Var) and get_dtype(atom) == "float32" and 0 not in get_shape(atom) for atom in atoms)


def read_product(eqn: JaxprEqn, transpose: JaxprEqn | None) -> Gradient | None:
    """Match a gradient by a kernel, perhaps transposed.

    The operands are then swapped. None if the native kernel does not compute it.
    """
    product = Product.from_equation(eqn)
    left, right = eqn.invars
    if transpose is not None:
        product = product.swap()
        left, right = right, left
    assert isinstance(left, Var)
    assert isinstance(right, Var)
    contracted = tuple(product.left.contracted), tuple(product.right.contracted)
    if product.is_left_to_xla or product.left.batch:
        return None
    if not is_for_gradient_kernel((product.left.shape, product.right.shape), contracted):
        return None
    return Gradient((eqn,) if transpose is None else (eqn, transpose), right, len(contracted[0]), left)


def read_sum_over_rows(eqn: JaxprEqn) -> Gradient | None:
    """Match a sum over first dimensions, but not over all."""
    (right,) = eqn.invars
    axes = tuple(eqn.params["axes"])
    is_over_rows = axes == tuple(range(len(axes))) and 0 < len(axes) < len(get_shape(right))
    if not is_over_rows or eqn.params.get("out_sharding") is not None:
        return None
    assert isinstance(right, Var)
    return Gradient((eqn,), right, len(axes))


def choose_gradients(gradients: Sequence[Gradient], made_at: Mapping[Var, int]) -> list[Gradient]:
    """Choose the matmuls, and one sum, that one call can compute.

    The call stands in the place of the first. Empty if nothing is joined.
    """
    place = min(made_at[gradient.start] for gradient in gradients)
    products = [gradient for gradient in gradients if gradient.left is not None and made_at.get(gradient.left, -1) < place]
    sums = [gradient for gradient in gradients if gradient.left is None][:1]
    return [*products, *sums] if products and len(products) + len(sums) > 1 else []


def make_joined_call(joined: Sequence[Gradient], place: JaxprEqn) -> JaxprEqn:
    """Build the equation that makes several gradients, in the place of another."""
    right = joined[0].right
    summed = joined[0].summed
    lefts = [gradient.left for gradient in joined if gradient.left is not None]
    compute = functools.partial(compute_gradients, summed, len(lefts) < len(joined))
    return make_call(Replacement(compute, [right, *lefts]), place.replace(outvars=[gradient.result for gradient in joined]))


def compute_gradients(summed: int, with_sums: bool, right: Array, *lefts: Array) -> tuple[Array, ...]:
    """Multiply the transposed `lefts` by `right`, over the first `summed` dimensions.

    `with_sums` adds the sum of `right` as the last result.
    """
    below = call_transposed_product([flatten_rows(left, summed) for left in lefts], flatten_rows(right, summed), with_sums)
    shapes = [left.shape[summed:] for left in lefts] + [()] * with_sums
    parts = lax.split(below, [math.prod(shape) for shape in shapes])
    return tuple(lax.reshape(part, (*shape, *right.shape[summed:])) for part, shape in zip(parts, shapes, strict=True))
