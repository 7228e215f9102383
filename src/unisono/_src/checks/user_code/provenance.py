"""Origins of the numbers of a traced program: sums over a replica's rows, divisors, shares of a loss."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple, cast

from jax.extend import core

from unisono._src.checks.user_code.jaxpr import Atom
from unisono._src.typing import AnyArray

UNCHANGED = ("convert_element_type", "reshape", "squeeze", "copy", "copy_p", "neg", "stop_gradient", "reduce_precision")
"""Primitives that hand a number on as it is, or with the other sign."""
SUMS = ("add", "add_any", "sub")
RESHAPED = ("broadcast_in_dim", "concatenate", "stack")
"""Primitives that hand numbers on as they are, in another shape."""
CLOSE = 1e-4
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint")


class NumberArgument(NamedTuple):
    """A number that is an argument of the function: its position among such arguments."""

    position: int


class RowSum(NamedTuple):
    """A sum over a replica's rows, and the constants that it is divided by on the way to a loss."""

    elements: int
    divisors: tuple[float | NumberArgument, ...] = ()
    factors: tuple[float, ...] = ()
    """The constants that it is multiplied by, as the divisors that do the same."""


class Equation(NamedTuple):
    """The primitive and the operands that make a number."""

    name: str
    inputs: list[Atom]
    axes: tuple[int, ...] = ()
    """The axes that a sum is taken over."""
    made_by: core.JaxprEqn | None = None
    """None where a number is handed on as it is."""
    index: int = 0
    """Its position among the results of the equation."""

    @property
    def is_sum_of_rows(self) -> bool:
        """Return whether the sum is over rows, the first axis: sums over other axes are of each row alone."""
        return self.name == "reduce_sum" and 0 in self.axes


class Scaling(NamedTuple):
    """The constants that a number is divided and multiplied by on the way to another number."""

    divisors: tuple[float | NumberArgument, ...] = ()
    factors: tuple[float, ...] = ()

    def divide_by(self, number: float | NumberArgument) -> Scaling:
        return self._replace(divisors=(*self.divisors, number))

    def multiply_by(self, number: float) -> Scaling:
        return self._replace(factors=(*self.factors, 1 / number))


UNSCALED = Scaling()


class LossTerm(NamedTuple):
    """A term of a loss: the loss is the sum of its terms, each divided and multiplied by constants."""

    variable: Atom
    outer_scaling: Scaling
    of_rows: bool
    """Whether it depends on a replica's rows; else it does on weights, as a regularizer."""
    inside: Scaling = UNSCALED
    """What its elements are divided by, if it is a sum over rows."""
    elements: int = 0
    """The number of elements of this sum."""

    @property
    def path(self) -> Scaling:
        return Scaling(self.outer_scaling.divisors + self.inside.divisors, self.outer_scaling.factors + self.inside.factors)


class Provenance:
    """The equations that make each number of a program. Functions inside the program are opened up."""

    def __init__(self, program: core.ClosedJaxpr, arrays_of_rows: int) -> None:
        """Read the program. Its first `arrays_of_rows` inputs are a replica's rows, the inputs behind them are the same for all replicas."""
        self._equations: dict[Atom, Equation] = {}
        self.program = program.jaxpr
        self.constants: dict[Atom, AnyArray] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        """Constant arrays, by the variables of the program that stand for them."""
        inputs = program.jaxpr.invars
        self._row_variables: set[Atom] = set(inputs[:arrays_of_rows])
        self._arguments: dict[Atom, NumberArgument] = {
            variable: NumberArgument(position) for position, variable in enumerate(inputs[arrays_of_rows:])
        }
        self._state_variables: set[Atom] = {
            variable for variable in program.jaxpr.constvars if variable.aval.shape and variable.aval.dtype.kind == "f"
        }
        self._open_program(program.jaxpr, {})

    def _open_program(self, jaxpr: core.Jaxpr, names: Mapping[Atom, Atom]) -> None:
        """Record the equations of a function. `names` are its variables, and what they are called outside of it."""

        def outside(variable: Atom) -> Atom:
            return variable if isinstance(variable, core.Literal) else names.get(variable, variable)

        for equation in jaxpr.eqns:
            inputs = [outside(variable) for variable in equation.invars]
            inner = equation.params.get("jaxpr") if equation.primitive.name in CALLS else None
            if inner is not None:
                if isinstance(inner, core.ClosedJaxpr):
                    self.constants |= zip(inner.jaxpr.constvars, inner.consts, strict=True)
                    inner = inner.jaxpr
                inside: dict[Atom, Atom] = {
                    variable: InnerVariable(variable) for nested in inner.eqns for variable in nested.outvars
                } | dict(zip(inner.invars, inputs, strict=True))
                self._open_program(inner, inside)
                for result, source in zip(equation.outvars, inner.outvars, strict=True):
                    origin = source if isinstance(source, core.Literal) else cast(Atom, inside.get(source, source))
                    self._record(outside(result), Equation("copy", [origin]))
                continue
            axes = tuple(equation.params.get("axes", ()))
            for index, result in enumerate(equation.outvars):
                self._record(outside(result), Equation(equation.primitive.name, inputs, axes, equation, index))

    def _record(self, result: Atom, equation: Equation) -> None:
        self._equations[result] = equation
        for dependent in (self._row_variables, self._state_variables):
            if any(not isinstance(variable, core.Literal) and variable in dependent for variable in equation.inputs):
                dependent.add(result)

    def can_reach(self, variable: Atom, targets: Iterable[Atom]) -> bool:
        """Return whether a number, or an element of an array, is one of the targets, a part of one, or a sum that has one as a term."""
        targets = set(targets)
        left = [(variable, 1.0)]
        while left:
            atom, factor = left.pop()
            if isinstance(atom, core.Literal):
                continue
            if atom in targets and abs(factor) <= 1 + CLOSE:
                return True
            equation = self._equations.get(atom)
            if equation is None:
                continue
            number = find_literal_number(equation.inputs)
            if equation.name in (*UNCHANGED, *SUMS, *RESHAPED):
                left += [(source, factor) for source in equation.inputs]
            elif equation.name == "mul" and number is not None:
                left += [(source, factor * number) for source in equation.inputs]
            elif equation.name == "div" and number:
                left.append((equation.inputs[0], factor / number))
        return False

    def slice_program(
        self, targets: Iterable[Atom], known: Container[Atom] = ()
    ) -> tuple[list[tuple[Atom, Equation]], set[Atom]]:
        """Return the variables that lead to the targets, each with its equation and in order, and the variables that they start from.

        They start from inputs, constants and `known` variables.
        """
        needed: set[Atom] = set()
        left = list(targets)
        while left:
            variable = left.pop()
            if isinstance(variable, core.Literal) or variable in needed:
                continue
            needed.add(variable)
            left += self._equations[variable].inputs if variable in self._equations and variable not in known else []
        made = [
            (variable, equation) for variable, equation in self._equations.items() if variable in needed and variable not in known
        ]
        return made, needed - {variable for variable, _ in made}

    def terms(self, variable: Atom, shares: Iterable[Atom] = (), path: Scaling = UNSCALED) -> Iterator[LossTerm]:
        """Yield the terms of a number, without these shares and without what depends neither on rows nor on weights."""
        shares = frozenset(shares)
        equation = None if isinstance(variable, core.Literal) else self._equations.get(variable)
        if (
            isinstance(variable, core.Literal)
            or variable in shares
            or not (variable in self._row_variables or variable in self._state_variables)
        ):
            return
        is_scaled = equation is not None and equation.name == "div" and not self._depends_on_data(equation.inputs[1])
        if equation is not None and equation.name in (*UNCHANGED, *SUMS):
            for source in equation.inputs:
                yield from self.terms(source, shares, path)
        elif equation is not None and is_scaled:
            yield from self.terms(equation.inputs[0], shares, self._divide_path(path, equation.inputs[1]))
        elif equation is not None and equation.name == "mul" and (number := find_literal_number(equation.inputs)):
            for source in equation.inputs:
                yield from self.terms(source, shares, path.multiply_by(number))
        elif variable in self._row_variables:
            if equation is not None and equation.is_sum_of_rows:
                yield LossTerm(variable, path, True, self.scaling(equation.inputs[0]), count_elements(equation.inputs[0]))
            else:
                yield LossTerm(variable, path, True)
        elif not self._has_share_in_it(variable, shares):
            yield LossTerm(variable, path, False)

    def _depends_on_data(self, variable: Atom) -> bool:
        """Return whether a number depends on rows or on weights."""
        return not isinstance(variable, core.Literal) and (variable in self._row_variables or variable in self._state_variables)

    def _has_share_in_it(self, variable: Atom, shares: frozenset[Atom]) -> bool:
        made, _ = self.slice_program([variable])
        return any(result in shares for result, _ in made)

    def means(self, variable: Atom, shares: Iterable[Atom] = ()) -> Iterator[RowSum]:
        """Yield the sums over rows that a number is made of, without these shares of means over the global batch."""
        return self._find_row_sums(variable, frozenset(shares), UNSCALED)

    def _find_row_sums(self, variable: Atom, shares: frozenset[Atom], path: Scaling) -> Iterator[RowSum]:
        equation = None if isinstance(variable, core.Literal) else self._equations.get(variable)
        if equation is None or variable in shares or variable not in self._row_variables:
            return
        number = find_literal_number(equation.inputs)
        if equation.name in (*UNCHANGED, *SUMS):
            for source in equation.inputs:
                yield from self._find_row_sums(source, shares, path)
        elif equation.name == "div":
            yield from self._find_row_sums(equation.inputs[0], shares, self._divide_path(path, equation.inputs[1]))
        elif equation.name == "mul":
            for source in equation.inputs:  # a factor that does not depend on the rows weights the one that does
                yield from self._find_row_sums(source, shares, path.multiply_by(number) if number else path)
        elif equation.is_sum_of_rows and not self.can_reach(equation.inputs[0], shares):
            yield RowSum(count_elements(equation.inputs[0]), *self.scaling(equation.inputs[0], path))

    def _divide_path(self, path: Scaling, divisor: Atom) -> Scaling:
        if isinstance(divisor, core.Literal):
            return path.divide_by(float(divisor.val)) if is_scalar_number(divisor) and divisor.val else path
        while (
            (equation := self._equations.get(divisor)) is not None
            and equation.name in (*UNCHANGED, *RESHAPED)
            and len(equation.inputs) == 1
        ):
            divisor = equation.inputs[0]
            if isinstance(divisor, core.Literal):
                return path
        if divisor in self._arguments and not divisor.aval.shape:
            return path.divide_by(self._arguments[divisor])
        return path

    def scaling(self, array: Atom, path: Scaling = UNSCALED) -> Scaling:
        """Return the constants that the elements of an array are divided by and multiplied by."""
        equation = None if isinstance(array, core.Literal) else self._equations.get(array)
        if equation is None or not equation.inputs:
            return path
        number = find_literal_number(equation.inputs)
        if equation.name == "div" and not isinstance(equation.inputs[0], core.Literal):
            if self._is_mean_of_each_row(equation.inputs[0], equation.inputs[1]):
                return path
            return self.scaling(equation.inputs[0], self._divide_path(path, equation.inputs[1]))
        if equation.name == "mul" and number:
            rest = next((variable for variable in equation.inputs if not isinstance(variable, core.Literal)), equation.inputs[0])
            return self.scaling(rest, path.multiply_by(number))
        return self.scaling(equation.inputs[0], path) if equation.name in UNCHANGED else path

    def _is_mean_of_each_row(self, array: Atom, divisor: Atom) -> bool:
        """Return whether a sum over axes behind the rows is divided by their size."""
        while (
            (equation := self._equations.get(array)) is not None
            and equation.name in UNCHANGED
            and not isinstance(equation.inputs[0], core.Literal)
        ):
            array = equation.inputs[0]
        if equation is None or equation.name != "reduce_sum" or equation.is_sum_of_rows or not isinstance(divisor, core.Literal):
            return False
        return is_scalar_number(divisor) and float(divisor.val) == count_elements(equation.inputs[0]) / count_elements(array)


class InnerVariable:
    """A variable of a function that was opened up; one for each call."""

    def __init__(self, variable: Atom) -> None:
        self.aval = variable.aval


def count_elements(variable: Atom) -> int:
    return math.prod(variable.aval.shape)


def is_scalar_number(literal: Atom) -> bool:
    return not literal.aval.shape and literal.aval.dtype.kind in "fiu"


def find_literal_number(inputs: list[Atom]) -> float | None:
    """Return the number that one of the inputs is as a literal; None where none is."""
    return next(
        (float(variable.val) for variable in inputs if isinstance(variable, core.Literal) and is_scalar_number(variable)), None
    )
