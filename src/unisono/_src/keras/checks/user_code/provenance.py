"""Trace the numbers of a user function back to their origins.

Its losses are taken apart into terms, each with the constants that it is divided by.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from jax.extend import core

from unisono._src.keras.checks.user_code.jaxpr import list_behind
from unisono._src.keras.replica.variable_discovery import Trace
from unisono._src.programs.inlining import inline_calls
from unisono._src.programs.operands import Atom, find_dependents, get_shape, get_type, list_variables

UNCHANGED = ("convert_element_type", "reshape", "squeeze", "copy", "copy_p", "neg", "stop_gradient", "reduce_precision")
"""Primitives that hand a number on as it is, or with the other sign."""
SUMS = ("add", "add_any", "sub")
RESHAPED = ("broadcast_in_dim", "concatenate", "stack")
"""Primitives that hand numbers on as they are, in another shape."""
CLOSE = 1e-4


class NumberArgument(NamedTuple):
    """A number that is an argument of the function. `position` counts such arguments."""

    position: int


class Scaling(NamedTuple):
    """The constants between a number and another that contains it. They divide or multiply it on the way."""

    divisors: tuple[float | NumberArgument, ...] = ()
    factors: tuple[float, ...] = ()
    """The numbers that it is multiplied by, as equivalent divisors."""

    def divide_by(self, number: float | NumberArgument) -> Scaling:
        return self._replace(divisors=(*self.divisors, number))

    def multiply_by(self, number: float) -> Scaling:
        return self._replace(factors=(*self.factors, 1 / number))

    def join(self, other: Scaling) -> Scaling:
        """Join the constants of two ways, one behind the other."""
        return Scaling(self.divisors + other.divisors, self.factors + other.factors)

    @property
    def known_numbers(self) -> list[float]:
        """The numbers that are no arguments."""
        return [number for number in (*self.divisors, *self.factors) if not isinstance(number, NumberArgument)]


UNSCALED = Scaling()


class LossTerm(NamedTuple):
    """A term of a loss. The loss is the sum of its terms, each divided and multiplied by constants."""

    variable: Atom
    outer_scaling: Scaling
    of_rows: bool
    """Whether it depends on a replica's rows; else it does on weights, as a regularizer."""
    inside: Scaling = UNSCALED
    """The constants that its elements are divided by, if it is a sum over rows."""
    elements: int = 0
    """The number of elements of this sum. 0 if it is no sum over rows, or a sum of shares."""

    @property
    def path(self) -> Scaling:
        return self.outer_scaling.join(self.inside)


class Provenance:
    """A traced user function, and the equation behind each of its numbers. Nested functions are inlined."""

    def __init__(self, trace: Trace) -> None:
        """Read the jaxpr.

        Its first inputs are a replica's rows. The inputs after them are the same for all replicas.
        """
        self.trace = trace._replace(program=inline_calls(trace.program))
        self.program: core.ClosedJaxpr = self.trace.program
        self._jaxpr = self.program.jaxpr
        self._equations = {variable: equation for equation in self._jaxpr.eqns for variable in equation.outvars}
        inputs = self._jaxpr.invars
        self._arguments = {variable: NumberArgument(position) for position, variable in enumerate(inputs[trace.arrays :])}
        self._row_variables = find_dependents(self._jaxpr, inputs[: trace.arrays])
        self._state_variables = find_dependents(
            self._jaxpr,
            [variable for variable in self._jaxpr.constvars if get_shape(variable) and get_type(variable).dtype.kind == "f"],
        )

    @property
    def replica_positions(self) -> set[int]:
        """The positions of the jaxpr's arguments that are the replica's own. They are its rows and its number."""
        return {*range(self.trace.arrays), self.trace.replica_position}

    def list_noted(self, kind: str) -> list[core.Var]:
        """List the variables of the noted arrays of this kind."""
        return list_variables(variable for _, variable in self.trace.noted.get(kind, []))

    @functools.cached_property
    def loss_terms(self) -> list[LossTerm]:
        """The terms of the losses that the code scales by itself. Shares of a mean over the global batch are left out."""
        noted = self.trace.noted
        shares = [share for kind, share in noted.get("share", []) if kind is None]
        return [term for _, loss in noted.get("loss", []) for term in self.terms(loss, shares)]

    @functools.cached_property
    def mean_scalings(self) -> list[Scaling]:
        """What the code divides and multiplies global means by. Functions of `un` returned these means."""
        means = set(self.list_noted("mean"))
        return [scaling for _, loss in self.trace.noted.get("loss", []) for scaling in self.list_scalings(loss, means)]

    @functools.cached_property
    def gradient_scalings(self) -> set[Scaling]:
        """What the code divides and multiplies gradients by. That is between `value_and_grad` and the optimizer."""
        derivatives = set(self.list_noted("derivatives"))
        gradients = self.list_noted("gradients")
        return {scaling for gradient in gradients for scaling in self.list_scalings(gradient, derivatives)}

    def list_scalings(self, variable: Atom, targets: Collection[Atom], path: Scaling = UNSCALED) -> Iterator[Scaling]:
        """Yield the constants between a number and each target among its terms."""
        if isinstance(variable, core.Literal):
            return
        if variable in targets:
            yield path
            return
        for source, scaled in self._list_sources(self._equations.get(variable), path):
            yield from self.list_scalings(source, targets, scaled)

    def _list_sources(self, equation: core.JaxprEqn | None, path: Scaling) -> list[tuple[Atom, Scaling]]:
        """List the terms of an equation's sum, each with its constants. Empty if the equation is no sum, quotient or multiple."""
        name = "" if equation is None else equation.primitive.name
        inputs = [] if equation is None else equation.invars
        number = find_literal_number(inputs)
        if name in (*UNCHANGED, *SUMS):
            return [(source, path) for source in inputs]
        if name == "div":
            return [(inputs[0], self._divide_path(path, inputs[1]))]
        return [(source, path.multiply_by(number)) for source in inputs] if name == "mul" and number else []

    def can_reach(self, variable: Atom, targets: Iterable[Atom]) -> bool:
        """Whether a number is a target, part of one, or contains one.

        It may be an element of an array. A sum contains its terms.
        """
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
            number = find_literal_number(equation.invars)
            if equation.primitive.name in (*UNCHANGED, *SUMS, *RESHAPED):
                left += [(source, factor) for source in equation.invars]
            elif equation.primitive.name == "mul" and number is not None:
                left += [(source, factor * number) for source in equation.invars]
            elif equation.primitive.name == "div" and number:
                left.append((equation.invars[0], factor / number))
        return False

    def terms(self, variable: Atom, shares: Collection[Atom] = (), path: Scaling = UNSCALED) -> Iterator[LossTerm]:
        """Yield the terms of a number that depend on rows or weights. These shares are left out."""
        of_rows = self._depends_on_rows(variable)
        if isinstance(variable, core.Literal) or variable in shares or not (of_rows or self._depends_on_state(variable)):
            return
        equation = self._equations.get(variable)
        name = "" if equation is None else equation.primitive.name
        inputs = [] if equation is None else equation.invars
        is_by_number = name != "div" or not (
            self._depends_on_rows(inputs[1]) or (self._depends_on_state(inputs[1]) and not of_rows)
        )
        sources = self._list_sources(equation, path) if is_by_number else []
        if sources:
            for source, scaled in sources:
                yield from self.terms(source, shares, scaled)
        elif name == "mul" and len(factors := [source for source in inputs if self._depends_on_rows(source)]) == 1:
            yield from self.terms(factors[0], shares, path)  # the other factor weights it
        elif of_rows and is_sum_of_rows(equation) and not self.can_reach(inputs[0], shares):
            yield LossTerm(variable, path, True, self.scaling(inputs[0]), count_elements(inputs[0]))
        elif of_rows or not self._is_made_of(variable, shares):
            yield LossTerm(variable, path, of_rows)

    def _depends_on_rows(self, variable: Atom) -> bool:
        return not isinstance(variable, core.Literal) and variable in self._row_variables

    def _depends_on_state(self, variable: Atom) -> bool:
        return not isinstance(variable, core.Literal) and variable in self._state_variables

    def _is_made_of(self, variable: Atom, shares: Collection[Atom]) -> bool:
        return any(result in shares for equation in list_behind(self._jaxpr, [variable]) for result in equation.outvars)

    def _divide_path(self, path: Scaling, divisor: Atom) -> Scaling:
        if isinstance(divisor, core.Literal):
            return path.divide_by(float(divisor.val)) if is_scalar_number(divisor) and divisor.val else path
        origin = self._follow_back(divisor, (*UNCHANGED, *RESHAPED))
        is_argument = origin in self._arguments and not get_shape(origin)
        return path.divide_by(self._arguments[origin]) if is_argument else path

    def _follow_back(self, variable: Atom, primitives: Sequence[str]) -> Atom:
        """Follow a variable back through these primitives, which only change its form."""
        while (equation := self._equations.get(variable)) is not None and equation.primitive.name in primitives:
            if len(list_variables(equation.invars)) != len(equation.invars) or len(equation.invars) != 1:
                return variable
            (variable,) = equation.invars
        return variable

    def scaling(self, array: Atom, path: Scaling = UNSCALED) -> Scaling:
        """The constants that divide and multiply the elements of an array."""
        equation = None if isinstance(array, core.Literal) else self._equations.get(array)
        if equation is None or not equation.invars:
            return path
        name = equation.primitive.name
        inputs = equation.invars
        number = find_literal_number(inputs)
        if name == "div" and not isinstance(inputs[0], core.Literal):
            if self._is_mean_of_each_row(inputs[0], inputs[1]):
                return path
            return self.scaling(inputs[0], self._divide_path(path, inputs[1]))
        if name == "mul" and number:
            return self.scaling(next(iter(list_variables(inputs)), inputs[0]), path.multiply_by(number))
        return self.scaling(inputs[0], path) if name in UNCHANGED else path

    def _is_mean_of_each_row(self, array: Atom, divisor: Atom) -> bool:
        """Whether a sum within each row is divided by its size."""
        array = self._follow_back(array, UNCHANGED)
        equation = self._equations.get(array)
        if equation is None or equation.primitive.name != "reduce_sum" or is_sum_of_rows(equation):
            return False
        elements_of_row = count_elements(equation.invars[0]) / count_elements(array)
        return isinstance(divisor, core.Literal) and is_scalar_number(divisor) and float(divisor.val) == elements_of_row


def is_sum_of_rows(equation: core.JaxprEqn | None) -> bool:
    """Whether an equation sums over rows, the first axis. Sums over other axes are of each row alone."""
    return equation is not None and equation.primitive.name == "reduce_sum" and 0 in equation.params["axes"]


def count_elements(variable: Atom) -> int:
    return math.prod(get_shape(variable))


def is_scalar_number(literal: Atom) -> bool:
    return not get_shape(literal) and get_type(literal).dtype.kind in "fiu"


def find_literal_number(inputs: Sequence[Atom]) -> float | None:
    """Find the number that one of the inputs is as a literal. None where none is."""
    return next(
        (float(variable.val) for variable in inputs if isinstance(variable, core.Literal) and is_scalar_number(variable)), None
    )
