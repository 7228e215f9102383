"""What the numbers of a traced program are made of: sums over a replica's rows, divisors, shares of a loss."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

from jax.extend import core

SAME = ("convert_element_type", "reshape", "squeeze", "copy", "copy_p", "neg", "stop_gradient", "reduce_precision")
"""What leaves a number what it is, or turns its sign."""
SUMS = ("add", "add_any", "sub")
LAID_OUT = ("broadcast_in_dim", "concatenate", "stack")
"""What leaves numbers what they are, in another shape."""
CLOSE = 1e-4
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint")


class Argument(NamedTuple):
    """A number that the function is given: its position among those."""

    position: int


class Mean(NamedTuple):
    """A sum over a replica's rows, and the constants that it is divided by on the way to a loss."""

    elements: int
    divisors: tuple[float | Argument, ...] = ()
    factors: tuple[float, ...] = ()
    """Of constants that it is multiplied by: what they would be as divisors."""


class Equation(NamedTuple):
    name: str
    inputs: list[Any]
    axes: tuple[int, ...] = ()
    """Over which a sum is taken."""
    made_by: core.JaxprEqn | None = None
    """None where a number is handed on as it is."""
    index: int = 0
    """Which of the results it is."""

    @property
    def is_sum_of_rows(self) -> bool:
        """Rows are the first axis; sums over others are each row's own affair."""
        return self.name == "reduce_sum" and 0 in self.axes


class Path(NamedTuple):
    """By what a number is divided and multiplied on the way to another one."""

    divisors: tuple[float | Argument, ...] = ()
    factors: tuple[float, ...] = ()

    def divided(self, number: float | Argument) -> Path:
        return self._replace(divisors=(*self.divisors, number))

    def multiplied(self, number: float) -> Path:
        return self._replace(factors=(*self.factors, 1 / number))


UNTOUCHED = Path()


class Term(NamedTuple):
    """A part of a loss: the loss is the sum of these, each divided and multiplied by constants."""

    variable: Any
    outside: Path
    of_rows: bool
    """Whether it depends on a replica's rows; else it does on weights, as a regularizer."""
    inside: Path = UNTOUCHED
    """By what the elements are divided of the sum over rows that it is, if it is one."""
    elements: int = 0
    """How many there are of them."""

    @property
    def path(self) -> Path:
        return Path(self.outside.divisors + self.inside.divisors, self.outside.factors + self.inside.factors)


class Sources:
    """Of what each number of a program is made. Functions inside of it are opened up."""

    def __init__(self, program: core.ClosedJaxpr, arrays_of_rows: int) -> None:
        """The first `arrays_of_rows` inputs are a replica's rows, those behind them are the same for all."""
        self._of: dict[Any, Equation] = {}
        self.program = program.jaxpr
        self.constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        """Arrays that the program has, by the variables that stand for them."""
        inputs = program.jaxpr.invars
        self._of_rows = set(inputs[:arrays_of_rows])
        self._arguments = {v: Argument(i) for i, v in enumerate(inputs[arrays_of_rows:])}
        self._of_state = {v for v in program.jaxpr.constvars if v.aval.shape and v.aval.dtype.kind == "f"}
        self._open(program.jaxpr, {})

    def _open(self, jaxpr: core.Jaxpr, names: dict[Any, Any]) -> None:
        """`names` are those of the function's variables outside of it."""

        def outside(variable: Any) -> Any:
            return variable if isinstance(variable, core.Literal) else names.get(variable, variable)

        for equation in jaxpr.eqns:
            inputs = [outside(v) for v in equation.invars]
            inner = equation.params.get("jaxpr") if equation.primitive.name in CALLS else None
            if inner is not None:
                if isinstance(inner, core.ClosedJaxpr):
                    self.constants |= zip(inner.jaxpr.constvars, inner.consts, strict=True)
                    inner = inner.jaxpr
                inside = {v: Inside(v) for e in inner.eqns for v in e.outvars} | dict(zip(inner.invars, inputs, strict=True))
                self._open(inner, inside)
                for result, source in zip(equation.outvars, inner.outvars, strict=True):
                    came = source if isinstance(source, core.Literal) else inside.get(source, source)
                    self._add(outside(result), Equation("copy", [came]))
                continue
            axes = tuple(equation.params.get("axes", ()))
            for index, result in enumerate(equation.outvars):
                self._add(outside(result), Equation(equation.primitive.name, inputs, axes, equation, index))

    def _add(self, result: Any, equation: Equation) -> None:
        self._of[result] = equation
        for known in (self._of_rows, self._of_state):
            if any(not isinstance(v, core.Literal) and v in known for v in equation.inputs):
                known.add(result)

    def reaches(self, variable: Any, targets: Iterable[Any]) -> bool:
        """Whether a number, or some of an array, is one of others, a part of one, or a sum with one of them in it."""
        targets, left = set(targets), [(variable, 1.0)]
        while left:
            now, times = left.pop()
            if isinstance(now, core.Literal):
                continue
            if now in targets and abs(times) <= 1 + CLOSE:
                return True
            equation = self._of.get(now)
            if equation is None:
                continue
            number = number_among(equation.inputs)
            if equation.name in (*SAME, *SUMS, *LAID_OUT):
                left += [(source, times) for source in equation.inputs]
            elif equation.name == "mul" and number is not None:
                left += [(source, times * number) for source in equation.inputs]
            elif equation.name == "div" and number:
                left.append((equation.inputs[0], times / number))
        return False

    def what_makes(self, targets: Iterable[Any], known: Container[Any] = ()) -> tuple[list[tuple[Any, Equation]], set[Any]]:
        """Return (the variables that lead to the targets and how each is made, in order; the inputs and constants that they start from, and
        what is known)."""
        needed, left = set(), list(targets)
        while left:
            variable = left.pop()
            if isinstance(variable, core.Literal) or variable in needed:
                continue
            needed.add(variable)
            left += self._of[variable].inputs if variable in self._of and variable not in known else []
        made = [(variable, equation) for variable, equation in self._of.items() if variable in needed and variable not in known]
        return made, needed - {variable for variable, _ in made}

    def terms(self, variable: Any, shares: Iterable[Any] = (), path: Path = UNTOUCHED) -> Iterator[Term]:
        """The parts that a number is the sum of, apart from these shares and from what depends neither on rows nor on weights."""
        shares = frozenset(shares)
        equation = None if isinstance(variable, core.Literal) else self._of.get(variable)
        if (
            isinstance(variable, core.Literal)
            or variable in shares
            or not (variable in self._of_rows or variable in self._of_state)
        ):
            return
        divided = equation is not None and equation.name == "div" and not self._depends(equation.inputs[1])
        if equation is not None and equation.name in (*SAME, *SUMS):
            for source in equation.inputs:
                yield from self.terms(source, shares, path)
        elif equation is not None and divided:
            yield from self.terms(equation.inputs[0], shares, self._divided_by(path, equation.inputs[1]))
        elif equation is not None and equation.name == "mul" and (number := number_among(equation.inputs)):
            for source in equation.inputs:
                yield from self.terms(source, shares, path.multiplied(number))
        elif variable in self._of_rows:
            if equation is not None and equation.is_sum_of_rows:
                yield Term(variable, path, True, self.scaling(equation.inputs[0]), size_of(equation.inputs[0]))
            else:
                yield Term(variable, path, True)
        elif not self._is_made_of(variable, shares):
            yield Term(variable, path, False)

    def _depends(self, variable: Any) -> bool:
        """Whether a number depends on rows or on weights."""
        return not isinstance(variable, core.Literal) and (variable in self._of_rows or variable in self._of_state)

    def _is_made_of(self, variable: Any, shares: frozenset[Any]) -> bool:
        made, _ = self.what_makes([variable])
        return any(result in shares for result, _ in made)

    def means(self, variable: Any, shares: Iterable[Any] = ()) -> Iterator[Mean]:
        """The sums over rows that a number is made of, apart from these shares of means over the global batch."""
        return self._parts(variable, frozenset(shares), UNTOUCHED)

    def _parts(self, variable: Any, shares: frozenset[Any], path: Path) -> Iterator[Mean]:
        equation = None if isinstance(variable, core.Literal) else self._of.get(variable)
        if equation is None or variable in shares or variable not in self._of_rows:
            return
        number = number_among(equation.inputs)
        if equation.name in (*SAME, *SUMS):
            for source in equation.inputs:
                yield from self._parts(source, shares, path)
        elif equation.name == "div":
            yield from self._parts(equation.inputs[0], shares, self._divided_by(path, equation.inputs[1]))
        elif equation.name == "mul":
            for source in equation.inputs:  # what does not depend on the rows is a weight of what does
                yield from self._parts(source, shares, path.multiplied(number) if number else path)
        elif equation.is_sum_of_rows and not self.reaches(equation.inputs[0], shares):
            yield Mean(size_of(equation.inputs[0]), *self.scaling(equation.inputs[0], path))

    def _divided_by(self, path: Path, divisor: Any) -> Path:
        if isinstance(divisor, core.Literal):
            return path.divided(float(divisor.val)) if is_number(divisor) and divisor.val else path
        while (
            (equation := self._of.get(divisor)) is not None and equation.name in (*SAME, *LAID_OUT) and len(equation.inputs) == 1
        ):
            divisor = equation.inputs[0]
            if isinstance(divisor, core.Literal):
                return path
        if divisor in self._arguments and not divisor.aval.shape:
            return path.divided(self._arguments[divisor])
        return path

    def scaling(self, array: Any, path: Path = UNTOUCHED) -> Path:
        """The constants that the elements of an array are divided by and multiplied by."""
        equation = None if isinstance(array, core.Literal) else self._of.get(array)
        if equation is None or not equation.inputs:
            return path
        number = number_among(equation.inputs)
        if equation.name == "div" and not isinstance(equation.inputs[0], core.Literal):
            if self._is_mean_of_each_row(equation.inputs[0], equation.inputs[1]):
                return path
            return self.scaling(equation.inputs[0], self._divided_by(path, equation.inputs[1]))
        if equation.name == "mul" and number:
            rest = next((v for v in equation.inputs if not isinstance(v, core.Literal)), equation.inputs[0])
            return self.scaling(rest, path.multiplied(number))
        return self.scaling(equation.inputs[0], path) if equation.name in SAME else path

    def _is_mean_of_each_row(self, array: Any, divisor: Any) -> bool:
        """Whether a sum over axes behind the rows is divided by their size."""
        while (
            (equation := self._of.get(array)) is not None
            and equation.name in SAME
            and not isinstance(equation.inputs[0], core.Literal)
        ):
            array = equation.inputs[0]
        if equation is None or equation.name != "reduce_sum" or equation.is_sum_of_rows or not isinstance(divisor, core.Literal):
            return False
        return is_number(divisor) and float(divisor.val) == size_of(equation.inputs[0]) / size_of(array)


class Inside:
    """A variable of a function that was opened up; one for each call."""

    def __init__(self, variable: Any) -> None:
        self.aval = variable.aval


def size_of(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def is_number(literal: Any) -> bool:
    return not literal.aval.shape and literal.aval.dtype.kind in "fiu"


def number_among(inputs: list[Any]) -> float | None:
    return next((float(v.val) for v in inputs if isinstance(v, core.Literal) and is_number(v)), None)
