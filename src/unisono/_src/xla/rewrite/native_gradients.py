"""Gradients that are sums over the rows of the same array, in one call of a native kernel.

The gradients by a layer's kernel, by its recurrent kernel and by its bias all read the gradient by the layer's result. One call reads it once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from unisono._src.native.products import call_transposed_product
from unisono._src.operands import get_dtype, get_shape
from unisono._src.xla.rewrite.contraction import Product, find_swapped_product
from unisono._src.xla.rewrite.equations import Producers, Replacement, make_call
from unisono._src.xla.rewrite.native_product import flatten_rows, is_for_gradient_kernel


class Gradient(NamedTuple):
    """A sum over the first dimensions of an array: of its products with another array, or of itself."""

    equations: tuple[JaxprEqn, ...]
    """What computes it; the last one makes the result."""
    right: Var
    summed: int
    """Over how many dimensions."""
    left: Var | None = None
    """The array with which `right` is multiplied; None for the gradient by a bias."""

    @property
    def start(self) -> Var:
        """Return what the first equation makes."""
        return self.equations[0].outvars[0]

    @property
    def result(self) -> Var:
        return self.equations[-1].outvars[0]


def join_gradients(program: Jaxpr) -> Jaxpr:
    """Return the program with one call for gradients that are sums over the rows of the same array."""
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
    """Yield the gradients by kernels that the native kernel computes, and sums over first dimensions, in the program's order."""
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
    """Return whether all operands and results are variables of float32 with elements."""
    atoms = [*eqn.invars, *eqn.outvars]
    return all(isinstance(atom, Var) and get_dtype(atom) == "float32" and 0 not in get_shape(atom) for atom in atoms)


def read_product(eqn: JaxprEqn, transpose: JaxprEqn | None) -> Gradient | None:
    """Return a product, with the operands swapped if it is transposed; None if the native kernel does not compute it."""
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
    """Return a sum over first dimensions, but not over all."""
    (right,) = eqn.invars
    axes = tuple(eqn.params["axes"])
    is_over_rows = axes == tuple(range(len(axes))) and 0 < len(axes) < len(get_shape(right))
    if not is_over_rows or eqn.params.get("out_sharding") is not None:
        return None
    assert isinstance(right, Var)
    return Gradient((eqn,), right, len(axes))


def choose_gradients(gradients: Sequence[Gradient], made_at: Mapping[Var, int]) -> list[Gradient]:
    """Return the products, and one sum behind them, that a call in the place of the first can compute; none if it joins nothing."""
    place = min(made_at[gradient.start] for gradient in gradients)
    products = [gradient for gradient in gradients if gradient.left is not None and made_at.get(gradient.left, -1) < place]
    sums = [gradient for gradient in gradients if gradient.left is None][:1]
    return [*products, *sums] if products and len(products) + len(sums) > 1 else []


def make_joined_call(joined: Sequence[Gradient], place: JaxprEqn) -> JaxprEqn:
    """Return an equation that makes the results of gradients, in the place of another."""
    right = joined[0].right
    summed = joined[0].summed
    lefts = [gradient.left for gradient in joined if gradient.left is not None]
    compute = functools.partial(compute_gradients, summed, len(lefts) < len(joined))
    return make_call(Replacement(compute, [right, *lefts]), place.replace(outvars=[gradient.result for gradient in joined]))


def compute_gradients(summed: int, with_sums: bool, right: Array, *lefts: Array) -> tuple[Array, ...]:
    """Return the products of arrays with `right` that are summed over the first `summed` dimensions, and then the sum of `right`."""
    below = call_transposed_product([flatten_rows(left, summed) for left in lefts], flatten_rows(right, summed), with_sums)
    shapes = [left.shape[summed:] for left in lefts] + [()] * with_sums
    parts = lax.split(below, [math.prod(shape) for shape in shapes])
    return tuple(lax.reshape(part, (*shape, *right.shape[summed:])) for part, shape in zip(parts, shapes, strict=True))
