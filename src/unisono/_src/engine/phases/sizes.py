"""Derive the jaxpr for any shard size from those of two sizes.

All that depends on the number of rows in the parameters of equations is a length, so it grows by the same amount for each row. So
a function need not be traced for each size. And it must not be traced for a single row: where arrays have one row, code
broadcasts them by other equations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import core

from unisono._src.engine.phases.twins import Equation, ProgramsDifferError, Twins
from unisono._src.programs.operands import Atom, get_shape, get_type
from unisono._src.typing import Shape

MOST_RECIPROCAL = 2**20
"""The largest reciprocal that counts as a count of rows, or half of one."""


def resize_twins(twins: Twins, size: int, in_shards: Container[int]) -> Twins:
    """Derive twins for a shard of `size` rows. The batch is the same.

    `in_shards` are the ids of the equations that shards compute. Others need no equation for the size, and may have none: pairs
    of neighbours among three rows.
    """
    sizer = Sizer(twins.rows, twins.shard_rows, size)
    equations: list[Equation] = []
    resized: dict[int, core.JaxprEqn] = {}
    shapes = {variable: sizer.resize_shape(get_shape(variable), twins.shapes[variable]) for variable in list_given(twins)}
    for one in twins.equations:
        try:
            if id(one.shard) not in resized:  # replicas have copies of equations
                resized[id(one.shard)] = sizer.resize_equation(one.whole, one.shard, {})
            shard = resized[id(one.shard)]
        except ProgramsDifferError:
            if id(one.whole) in in_shards:
                raise
            shard = one.whole
        equations.append(Equation(one.whole, shard, one.rows, size))
        shapes |= {of_whole: get_shape(of_shard) for of_whole, of_shard in zip(one.whole.outvars, shard.outvars, strict=True)}
    return Twins(equations, twins.inputs, twins.outputs, twins.constants, shapes, {}, twins.rows, size)


def replace_shards(twins: Twins, plain: Twins, of_size: Twins) -> Twins:
    """Give twins the shards of another size.

    `plain` are the same twins without copies of equations, `of_size` those of the other size.
    """
    pairs = zip(plain.equations, of_size.equations, strict=True)
    shards = {id(one.shard): other.shard for one, other in pairs}
    equations = [one._replace(shard=shards[id(one.shard)], shard_rows=of_size.shard_rows) for one in twins.equations]
    shapes = dict(of_size.shapes)
    for one in equations:
        shapes |= zip(one.whole.outvars, map(get_shape, one.shard.outvars), strict=True)
    return twins._replace(equations=equations, shapes=shapes, own_constants=of_size.own_constants, shard_rows=of_size.shard_rows)


def list_given(twins: Twins) -> list[core.Var]:
    """The variables that no equation makes."""
    return [*twins.inputs, *twins.constants]


@dataclasses.dataclass(frozen=True)
class Sizer:
    """Extrapolates values to `size` rows, from those for two other row counts."""

    rows: int
    other: int
    size: int

    def resize(self, whole: Any, shard: Any) -> Any:
        """Derive a parameter for the size."""
        if isinstance(whole, core.ClosedJaxpr) and isinstance(shard, core.ClosedJaxpr):
            return core.ClosedJaxpr(self.resize_program(whole.jaxpr, shard.jaxpr), shard.consts)
        if isinstance(whole, core.Jaxpr) and isinstance(shard, core.Jaxpr):
            return self.resize_program(whole, shard)
        if isinstance(whole, jax.ShapeDtypeStruct) and isinstance(shard, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.resize_shape(whole.shape, shard.shape), shard.dtype)
        if isinstance(whole, ShapedArray) and isinstance(shard, ShapedArray):
            return shard.update(shape=self.resize_shape(whole.shape, shard.shape))
        if isinstance(whole, int) and isinstance(shard, int) and whole != shard:
            return self.resize_count(whole, shard)
        values = getattr(whole, "val", None)
        if isinstance(values, np.ndarray):  # an array that is hashed by its values, as attributes of calls are
            return self._resize_array(values, shard)
        if isinstance(whole, tuple | list) and isinstance(shard, tuple | list) and type(whole) in (tuple, list):
            return self._resize_items(whole, shard)
        if isinstance(whole, dict) and isinstance(shard, dict) and whole.keys() == shard.keys():
            return {key: self.resize(value, shard[key]) for key, value in whole.items()}
        return shard

    def _resize_items(self, whole: Sequence[Any], shard: Sequence[Any]) -> Sequence[Any]:
        items = [self.resize(*pair) for pair in zip(whole, shard, strict=True)] if len(whole) == len(shard) else shard
        return tuple(items) if isinstance(shard, tuple) else list(items)

    def _resize_array(self, whole: np.ndarray, shard: Any) -> Any:
        """Derive an array attribute of a call for the size."""
        own: np.ndarray = shard.val
        numbers = [self.resize(*pair) for pair in zip(whole.ravel().tolist(), own.ravel().tolist(), strict=True)]
        return type(shard)(np.array(numbers, own.dtype).reshape(own.shape))

    def resize_shape(self, whole: Shape, shard: Shape) -> Shape:
        if len(whole) != len(shard):  # code that sees one row may take its axis away
            raise ProgramsDifferError(f"An array has shape {whole} for {self.rows} rows and {shard} for {self.other}.")
        return tuple(self.resize_count(one, other) for one, other in zip(whole, shard, strict=True))

    def resize_count(self, whole: int, shard: int) -> int:
        """Derive a length, or a count, for the size."""
        return int(self._resize_fraction(Fraction(whole), Fraction(shard)))

    def _interpolate(self, whole: Fraction, shard: Fraction) -> Fraction:
        return shard + (whole - shard) * Fraction(self.size - self.other, self.rows - self.other)

    def _resize_fraction(self, whole: Fraction, shard: Fraction) -> Fraction:
        number = self._interpolate(whole, shard)
        if number.denominator != 1:
            raise ProgramsDifferError(
                f"A number is {whole} for {self.rows} rows and {shard} for {self.other}, and none for {self.size}."
            )
        return number

    def resize_literal(self, whole: core.Literal, shard: core.Literal) -> core.Literal:
        """Derive a literal for the size. It is a count of rows, or its reciprocal."""
        values = [np.asarray(one.val) for one in (whole, shard)]
        if values[0].shape or values[0] == values[1] or values[1] != values[1]:
            return shard
        one, other = map(complex, values)
        number = self._resize_number(one.real, other.real)
        if np.iscomplexobj(values[1]):
            number = complex(number, self._resize_number(one.imag, other.imag))
        return core.Literal(values[1].dtype.type(number), shard.aval)

    def _resize_number(self, whole: float, shard: float) -> float:
        """Derive a count of rows, or its reciprocal, for the size."""
        numbers = (whole, shard)
        if all(number.is_integer() for number in numbers):
            return float(self._resize_fraction(*map(Fraction, numbers)))
        if all(1 / MOST_RECIPROCAL < abs(number) < math.inf for number in numbers):
            inverse = [Fraction(1 / number).limit_denominator(2) for number in numbers]
            if all(abs(1 / number - float(one)) < 1e-3 for number, one in zip(numbers, inverse, strict=True)):
                return 1 / float(self._interpolate(*inverse))  # of half the rows too, as in the gradient of a variance
        raise ProgramsDifferError(f"A literal is {whole} for {self.rows} rows and {shard} for {self.other}.")

    def resize_equation(self, whole: core.JaxprEqn, shard: core.JaxprEqn, names: dict[core.Var, core.Var]) -> core.JaxprEqn:
        """Derive an equation for the size. `names` are the variables of its jaxpr, by those of the shard's."""
        inputs: list[Atom] = []
        for one, other in zip(whole.invars, shard.invars, strict=True):
            if isinstance(one, core.Literal) and isinstance(other, core.Literal):
                inputs.append(self.resize_literal(one, other))
            else:
                assert isinstance(other, core.Var)  # the equations correspond
                inputs.append(names[other] if other in names else self.resize_variable(one, other, names))
        outputs = [self.resize_variable(one, other, names) for one, other in zip(whole.outvars, shard.outvars, strict=True)]
        params = {name: self.resize(value, shard.params[name]) for name, value in whole.params.items()}
        return shard.replace(invars=inputs, outvars=outputs, params=params)

    def resize_variable(self, whole: Atom, shard: core.Var, names: dict[core.Var, core.Var]) -> core.Var:
        """Make a variable in the place of the shard's, and note it."""
        shape = self.resize_shape(get_shape(whole), get_shape(shard))
        names[shard] = core.Var(get_type(shard).update(shape=shape))
        return names[shard]

    def resize_program(self, whole: core.Jaxpr, shard: core.Jaxpr) -> core.Jaxpr:
        """Derive the jaxpr of a loop or a branch for the size."""
        names: dict[core.Var, core.Var] = {}

        def resize_all(wholes: list[core.Var], shards: list[core.Var]) -> list[core.Var]:
            return [self.resize_variable(*pair, names) for pair in zip(wholes, shards, strict=True)]

        inputs, constants = resize_all(whole.invars, shard.invars), resize_all(whole.constvars, shard.constvars)
        if len(whole.eqns) != len(shard.eqns):
            raise ProgramsDifferError("The body of a loop is another program for another number of rows.")
        equations = [self.resize_equation(*pair, names) for pair in zip(whole.eqns, shard.eqns, strict=True)]
        outputs = [atom if isinstance(atom, core.Literal) else names[atom] for atom in shard.outvars]
        return shard.replace(invars=inputs, constvars=constants, eqns=equations, outvars=outputs)
