"""Attention by the native kernel, from the scores to the weighted values.

It is recognised by what it computes, in a jaxpr that is not differentiated yet. So layers of Keras, `jax.nn`, and attention
written by hand are the same. The kernel stores no matrix of weights, and brings its own gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn, Literal

from unisono._src.kernels.layers.score_chain import Mask, NoAttentionError, read_scores, read_weights, split_masks
from unisono._src.kernels.layers.views import Label, View, name_dimensions, place_elements
from unisono._src.kernels.native.attention import NOWHERE, AttentionArrays, AttentionLayout, Distances, compute_attention
from unisono._src.kernels.native.library import load_kernels
from unisono._src.programs.equations import Producers, Replacement
from unisono._src.programs.operands import Atom, get_dtype, get_shape
from unisono._src.typing import Shape

LEAST_ROWS = 8
"""The fewest queries, and keys, for which the kernel is faster than XLA's matmuls."""

FEATURE = -1
"""The label of the dimension of features."""

Roles = tuple[Label, ...]
"""The labels of the kernel's dimensions: three of items, groups, queries, keys."""


class Rows(NamedTuple):
    """Queries, keys or values: an array with labelled dimensions. `order` puts the features last; `labels` are in that order."""

    atom: Atom
    order: tuple[int, ...]
    labels: tuple[Label, ...]

    @classmethod
    def from_view(cls, view: View) -> Rows:
        if view.labels.count(FEATURE) != 1 or get_dtype(view.atom) != "float32":
            raise NoAttentionError
        last = view.labels.index(FEATURE)
        order = (*(axis for axis in range(len(view.labels)) if axis != last), last)
        return cls(view.atom, order, tuple(view.labels[axis] for axis in order))

    @property
    def shape(self) -> Shape:
        return tuple(get_shape(self.atom)[axis] for axis in self.order)

    @property
    def names(self) -> set[int]:
        """The labels of all dimensions but the features."""
        return {label for label in self.labels if label not in (None, FEATURE)}

    def measure(self, label: Label) -> int:
        """The size of a dimension; 1 if it has no label."""
        return 1 if label is None else self.shape[self.labels.index(label)]

    def place(self, roles: Roles) -> Distances:
        """The stride of the array in each of the kernel's dimensions."""
        distances = dict(zip(self.labels, place_elements(self.shape), strict=True))
        return tuple(0 if label is None else distances.get(label, 0) for label in roles)

    def arrange(self, array: Array) -> Array:
        return array if self.order == tuple(range(array.ndim)) else lax.transpose(array, self.order)


class Shared(NamedTuple):
    """Masks or a bias: arrays that several scores may share. Several masks must all be true."""

    parts: tuple[Mask, ...]

    def measure(self, roles: Roles) -> Shape:
        """The shape in the kernel's dimensions. It is 1 where scores share elements."""
        return np.broadcast_shapes(*(arrange_shape(mask.view, roles) for mask in self.parts))

    def place(self, roles: Roles) -> Distances:
        shape = self.measure(roles)
        return tuple(0 if size == 1 else distance for size, distance in zip(shape, place_elements(shape), strict=True))

    def arrange(self, arrays: Sequence[Array], roles: Roles) -> Array:
        """Reshape the array to the kernel's dimensions."""
        arranged = [arrange_roles(mask, array, roles) for mask, array in zip(self.parts, arrays, strict=True)]
        return functools.reduce(jnp.logical_and, arranged) if len(arranged) > 1 else arranged[0]


def arrange_shape(view: View, roles: Roles) -> Shape:
    sizes = dict(zip(view.labels, get_shape(view.atom), strict=True))
    return tuple(1 if label is None else sizes.get(label, 1) for label in roles)


def arrange_roles(mask: Mask, array: Array, roles: Roles) -> Array:
    array = jnp.logical_not(array) if mask.is_inverted else array
    named = [axis for axis, label in enumerate(mask.view.labels) if label is not None]
    order = sorted(named, key=lambda axis: roles.index(mask.view.labels[axis]))
    unnamed = [axis for axis in range(array.ndim) if axis not in named]
    return lax.reshape(lax.transpose(array, (*unnamed, *order)), arrange_shape(mask.view, roles))


class Attention(NamedTuple):
    """An attention, as found in a jaxpr."""

    layout: AttentionLayout
    roles: Roles
    rows: tuple[Rows, ...]
    """Queries, keys and values."""
    shared: tuple[Shared, ...]
    """Two masks, the bias, and the dropout mask of the weights. Absent ones have no parts."""
    result: tuple[Label, ...]
    """The labels of the second matmul's dimensions."""

    @property
    def operands(self) -> list[Atom]:
        return [*(rows.atom for rows in self.rows), *(part.view.atom for shared in self.shared for part in shared.parts)]


def replace_attention(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Replace softmax weights times values by the attention kernel."""
    if eqn.primitive.name != "dot_general" or get_dtype(eqn.outvars[0]) != "float32" or load_kernels().level is None:
        return None
    for side in (0, 1):
        try:
            attention = read_attention(eqn, side, made_by)
        except NoAttentionError:
            continue
        return Replacement(functools.partial(run_attention, attention, get_shape(eqn.outvars[0])), attention.operands)
    return None


def read_attention(eqn: JaxprEqn, side: int, made_by: Producers) -> Attention:
    """Read the attention whose weights are operand `side` of a matmul. `NoAttentionError` says that there is none."""
    weights = eqn.invars[side]
    values = eqn.invars[1 - side]
    if isinstance(weights, Literal) or made_by.find_if_read_once(weights) is None:  # the jaxpr needs the weights themselves
        raise NoAttentionError
    names = name_dimensions(get_shape(weights))
    value_view, result = name_values(eqn, side, names, values)
    contracted = eqn.params["dimension_numbers"][0][side]
    key = expect_one(names[axis] for axis in contracted)
    chain = read_weights(View(weights, names), key, made_by)
    scores = read_scores(chain.scores, made_by)
    queries, keys = (Rows.from_view(view) for view in name_product(scores.product, scores.labels, key))
    of_values = Rows.from_view(value_view)
    items = keys.names - {key}
    if key not in keys.names or of_values.names != keys.names or not items.issubset(queries.names):
        raise NoAttentionError
    rows = sorted(queries.names - items, key=queries.measure)
    if not 1 <= len(rows) <= 2 or len(items) > 3 or queries.names | {key} != {label for label in names if label is not None}:
        raise NoAttentionError
    roles = (*pad_names(sorted(items), 3), *pad_names(rows, 2), key)
    if min(queries.measure(roles[4]), keys.measure(key)) < LEAST_ROWS:
        raise NoAttentionError
    masks = [Shared((mask,)) for mask in split_masks(scores.masks, 2, made_by)]
    bias = Shared(()) if scores.bias is None else Shared((Mask(scores.bias),))
    shared = (*masks, *[Shared(())] * (2 - len(masks)), bias, Shared(tuple(chain.kept)))
    sizes = (*(queries.measure(label) for label in roles[:5]), keys.measure(key), queries.shape[-1], of_values.shape[-1])
    arrays = (queries, keys, of_values)
    distances = [rows.place(roles) for rows in arrays] + [part.place(roles) if part.parts else NOWHERE for part in shared]
    layout = AttentionLayout(sizes, tuple(distances), scores.scale, scores.fill, scores.adds_fill, chain.factor)
    return Attention(layout, roles, arrays, shared, result)


def expect_one(labels: Iterable[Label]) -> int:
    """The only label among some. `NoAttentionError` if there are none or several."""
    names = [label for label in labels if label is not None]
    if len(names) != 1:
        raise NoAttentionError
    return names[0]


def pad_names(labels: Sequence[int], count: int) -> tuple[Label, ...]:
    return (*[None] * (count - len(labels)), *labels)


def name_values(eqn: JaxprEqn, side: int, names: tuple[Label, ...], values: Atom) -> tuple[View, tuple[Label, ...]]:
    """Label the dimensions of the values and of the result. The labels of the weights are known."""
    shape = get_shape(values)
    labels: list[Label] = list(name_features(shape))
    pairs = [(axes[side], axes[1 - side]) for axes in eqn.params["dimension_numbers"]]
    for of_weights, of_values in pairs:
        for axis, other in zip(of_weights, of_values, strict=True):
            labels[other] = names[axis]
    used, used_of_values = ({*contracted, *batch} for contracted, batch in zip(*pairs, strict=True))
    free = [label for axis, label in enumerate(names) if axis not in used]
    free_of_values = [label for axis, label in enumerate(labels) if axis not in used_of_values]
    batch = [names[axis] for axis in pairs[1][0]]
    return View(values, tuple(labels)), (*batch, *(free_of_values + free if side else free + free_of_values))


def name_features(shape: Shape) -> tuple[Label, ...]:
    return tuple(None if size == 1 else FEATURE for size in shape)


def name_product(eqn: JaxprEqn, product: View, key: int) -> tuple[View, View]:
    """Split a matmul into queries and keys, with labels. The keys are the operand that has the dimension `key`."""
    views: list[View] = []
    contracted, batch = eqn.params["dimension_numbers"]
    names = iter(product.labels[len(batch[0]) :])
    for side, atom in enumerate(eqn.invars):
        labels: list[Label] = list(name_features(get_shape(atom)))
        for axis, label in zip(batch[side], product.labels, strict=False):
            labels[axis] = label
        for axis in range(len(labels)):
            if axis not in (*batch[side], *contracted[side]):
                labels[axis] = next(names)
        views.append(View(atom, tuple(labels)))
    left, right = views
    return (right, left) if key in left.labels else (left, right)


def run_attention(attention: Attention, shape: Shape, *operands: Array) -> Array:
    """Compute attention in the result's original layout."""
    rest = list(operands[3:])
    shared = [
        part.arrange([rest.pop(0) for _ in part.parts], attention.roles) if part.parts else jnp.zeros((0,), dtype)
        for part, dtype in zip(attention.shared, (bool, bool, jnp.float32, bool), strict=True)
    ]
    rows = [rows.arrange(array) for rows, array in zip(attention.rows, operands[:3], strict=True)]
    out = compute_attention(attention.layout, AttentionArrays(*rows, *shared))
    labels = [label for label in attention.rows[0].labels if label is not None]
    named = [label for label in attention.result if label is not None]
    out = lax.reshape(out, [size for size in out.shape if size != 1])
    return lax.reshape(lax.transpose(out, [labels.index(label) for label in named]), shape)
