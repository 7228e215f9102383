"""What the numbers of a traced program are made of: sums over a replica's rows, divisors, shares of a loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jax.extend import core

SAME = ("convert_element_type", "reshape", "squeeze", "copy", "copy_p", "neg", "stop_gradient", "reduce_precision")
"""What leaves a number what it is, or turns its sign."""
SUMS = ("add", "add_any", "sub")
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint")


class Mean(NamedTuple):
    """A sum over a replica's rows, and the constants that it is divided by on the way to a loss."""

    elements: int
    divisors: tuple[float, ...]
    factors: tuple[float, ...]
    """Of constants that it is multiplied by: what they would be as divisors."""

    @property
    def divisor(self) -> float:
        return math.prod(self.divisors)


class Equation(NamedTuple):
    name: str
    inputs: list[Any]


class Sources:
    """Of what each number of a program is made. Functions inside of it are opened up."""

    def __init__(self, program: core.ClosedJaxpr, arrays_of_rows: int) -> None:
        """The first `arrays_of_rows` inputs are a replica's rows."""
        self._of: dict[Any, Equation] = {}
        self._of_rows = set(program.jaxpr.invars[:arrays_of_rows])
        self._open(program.jaxpr, {})

    def _open(self, jaxpr: core.Jaxpr, names: dict[Any, Any]) -> None:
        """`names` are those of the function's variables outside of it."""

        def outside(variable: Any) -> Any:
            return variable if isinstance(variable, core.Literal) else names.get(variable, variable)

        for equation in jaxpr.eqns:
            inputs = [outside(v) for v in equation.invars]
            inner = equation.params.get("jaxpr") if equation.primitive.name in CALLS else None
            if inner is not None:
                inner = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
                inside = {v: Inside(v) for e in inner.eqns for v in e.outvars} | dict(zip(inner.invars, inputs, strict=True))
                self._open(inner, inside)
                for result, source in zip(equation.outvars, inner.outvars, strict=True):
                    came = source if isinstance(source, core.Literal) else inside.get(source, source)
                    self._add(outside(result), Equation("copy", [came]))
                continue
            for result in equation.outvars:
                self._add(outside(result), Equation(equation.primitive.name, inputs))

    def _add(self, result: Any, equation: Equation) -> None:
        self._of[result] = equation
        if any(not isinstance(v, core.Literal) and v in self._of_rows for v in equation.inputs):
            self._of_rows.add(result)

    def reaches(self, variable: Any, targets: Iterable[Any]) -> bool:
        """Whether a number is one of others, or a sum with one of them in it."""
        targets, left = set(targets), [variable]
        while left:
            now = left.pop()
            if isinstance(now, core.Literal):
                continue
            if now in targets:
                return True
            equation = self._of.get(now)
            if equation is not None and equation.name in (*SAME, *SUMS):
                left += equation.inputs
        return False

    def means(self, variable: Any, divisors: tuple[float, ...] = (), factors: tuple[float, ...] = ()) -> Iterator[Mean]:
        """The sums over rows that a number is made of."""
        equation = None if isinstance(variable, core.Literal) else self._of.get(variable)
        if equation is None or variable not in self._of_rows:
            return
        number = next((float(v.val) for v in equation.inputs if isinstance(v, core.Literal) and is_number(v)), None)
        if equation.name in (*SAME, *SUMS):
            for source in equation.inputs:
                yield from self.means(source, divisors, factors)
        elif equation.name == "div" and number and not isinstance(equation.inputs[0], core.Literal):
            yield from self.means(equation.inputs[0], (*divisors, number), factors)
        elif equation.name == "mul":
            for source in equation.inputs:
                yield from self.means(source, divisors, (*factors, 1 / number) if number else factors)
        elif equation.name == "reduce_sum":
            yield Mean(size_of(equation.inputs[0]), (*divisors, *self._divided(equation.inputs[0])), factors)

    def _divided(self, array: Any) -> Iterator[float]:
        """The constants that the elements of an array are divided by."""
        equation = None if isinstance(array, core.Literal) else self._of.get(array)
        if equation is None or equation.name not in (*SAME, "div"):
            return
        if equation.name == "div":
            divisor = equation.inputs[1]
            if not isinstance(divisor, core.Literal) or not is_number(divisor):
                return
            yield float(divisor.val)
        yield from self._divided(equation.inputs[0])


class Inside:
    """A variable of a function that was opened up; one for each call."""

    def __init__(self, variable: Any) -> None:
        self.aval = variable.aval


def size_of(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def is_number(literal: Any) -> bool:
    return not literal.aval.shape and literal.aval.dtype.kind in "fiu"
