"""Operands and results of the equations of a traced program."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias, cast

from jax.core import ShapedArray
from jax.extend import core

from unisono._src.typing import Shape

Atom: TypeAlias = core.Var | core.Literal
"""An operand or a result: a variable of the program, or a number in its place."""


def get_type(atom: Atom) -> ShapedArray:
    """Get the shape and dtype of an operand. JAX types it as a class that has neither."""
    return cast(ShapedArray, atom.aval)


def get_shape(atom: Atom) -> Shape:
    return get_type(atom).shape


def get_dtype(atom: Atom) -> str:
    return get_type(atom).dtype.name


def count_bytes(atom: Atom) -> int:
    return math.prod(get_shape(atom)) * get_type(atom).dtype.itemsize


def list_variables(atoms: Iterable[Atom]) -> list[core.Var]:
    """List the operands that are no literals. Literals are in no set: they have no hash."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def find_dependents(program: core.Jaxpr, sources: Iterable[Atom]) -> set[Atom]:
    """Find the sources, and all variables that are computed from them."""
    dependents = set(sources)
    for equation in program.eqns:
        if not dependents.isdisjoint(list_variables(equation.invars)):
            dependents |= set(equation.outvars)
    return dependents
