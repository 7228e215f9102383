"""See arrays of a jaxpr through transposes, broadcasts and reshapes.

These only arrange elements, or add dimensions of size 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn, Literal

from unisono._src.programs.equations import Producers
from unisono._src.programs.operands import Atom, get_shape
from unisono._src.typing import Shape

Label: TypeAlias = int | None
"""The label of a dimension; None for a dimension of size 1."""


class View(NamedTuple):
    """An array, and the labels of its dimensions."""

    atom: Atom
    labels: tuple[Label, ...]

    def rename(self, atom: Atom) -> View:
        """Label another array of the same shape the same way."""
        return View(atom, match_labels(self.labels, get_shape(self.atom), get_shape(atom)))

    @property
    def names(self) -> tuple[int, ...]:
        """The labels of the dimensions that are not of size 1."""
        return tuple(label for label in self.labels if label is not None)


def name_dimensions(shape: Shape) -> tuple[Label, ...]:
    """Label the dimensions of an array by their numbers.

    >>> name_dimensions((4, 1, 3))
    (0, None, 2)
    """
    return tuple(None if size == 1 else axis for axis, size in enumerate(shape))


def match_labels(labels: Sequence[Label], shape: Shape, other: Shape) -> tuple[Label, ...]:
    """Label an operand's dimensions as a result's. Dimensions of size 1 have no label."""
    if len(shape) != len(other):  # a number
        return (None,) * len(other)
    return tuple(None if size == 1 else label for label, size in zip(labels, other, strict=True))


def find_maker(view: View, made_by: Producers) -> JaxprEqn | None:
    return made_by.find(view.atom)


def skip_arrangement(view: View, made_by: Producers) -> View:
    """Skip transposes, broadcasts and plain reshapes, back to their operand."""
    while (eqn := find_maker(view, made_by)) is not None:
        before = step_back(view, eqn)
        if before is None:
            return view
        view = before
    return view


def step_back(view: View, eqn: JaxprEqn) -> View | None:
    """The operand of an equation that only arranges elements. None for another equation."""
    name = eqn.primitive.name
    if name not in ("transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "copy_p"):
        return None
    before = eqn.invars[0]
    shape = get_shape(before)
    if name == "transpose":
        labels: list[Label] = [None] * len(shape)
        for axis, label in zip(eqn.params["permutation"], view.labels, strict=True):
            labels[axis] = label
        return View(before, tuple(labels))
    if name == "broadcast_in_dim":
        axes = eqn.params["broadcast_dimensions"]
        return View(before, tuple(None if size == 1 else view.labels[axis] for axis, size in zip(axes, shape, strict=True)))
    after = get_shape(eqn.outvars[0])
    if [size for size in shape if size != 1] != [size for size in after if size != 1]:
        return None
    names = iter(view.names)
    return View(before, tuple(None if size == 1 else next(names) for size in shape))


def read_constant(atom: Atom, made_by: Producers) -> float | None:
    """The number that all elements of an array are. None if the jaxpr does not say."""
    while not isinstance(atom, Literal):
        eqn = made_by.find(atom)
        if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "reshape", "convert_element_type"):
            return None
        (atom, *_) = eqn.invars
    return float(atom.val) if get_shape(atom) == () else None


def place_elements(shape: Shape) -> list[int]:
    """Compute the strides of an array, in elements.

    >>> place_elements((2, 3, 4))
    [12, 4, 1]
    """
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
