"""What the numbers of a traced program are made of: sums over a replica's rows, divisors, shares of a loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
    of_replica: bool = False
    """Whether it is divided by something that is computed of the replica's rows, as a weighted mean is by their weights."""


class Whole(NamedTuple):
    """Something that does not depend on the rows, but on weights: a regularizer."""

    divisors: tuple[float | Argument, ...] = ()
    factors: tuple[float, ...] = ()


class Equation(NamedTuple):
    name: str
    inputs: list[Any]
    axes: tuple[int, ...] = ()
    """Over which a sum is taken."""

    @property
    def is_sum_of_rows(self) -> bool:
        """Rows are the first axis; sums over others are each row's own affair."""
        return self.name == "reduce_sum" and 0 in self.axes


class Path(NamedTuple):
    """By what a number is divided and multiplied on the way to another one."""

    divisors: tuple[float | Argument, ...] = ()
    factors: tuple[float, ...] = ()
    of_replica: bool = False

    def divided(self, number: float | Argument) -> Path:
        return self._replace(divisors=(*self.divisors, number))

    def multiplied(self, number: float) -> Path:
        return self._replace(factors=(*self.factors, 1 / number))


UNTOUCHED = Path()


class Sources:
    """Of what each number of a program is made. Functions inside of it are opened up."""

    def __init__(self, program: core.ClosedJaxpr, arrays_of_rows: int) -> None:
        """The first `arrays_of_rows` inputs are a replica's rows, those behind them are the same for all."""
        self._of: dict[Any, Equation] = {}
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
                inner = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
                inside = {v: Inside(v) for e in inner.eqns for v in e.outvars} | dict(zip(inner.invars, inputs, strict=True))
                self._open(inner, inside)
                for result, source in zip(equation.outvars, inner.outvars, strict=True):
                    came = source if isinstance(source, core.Literal) else inside.get(source, source)
                    self._add(outside(result), Equation("copy", [came]))
                continue
            for result in equation.outvars:
                self._add(outside(result), Equation(equation.primitive.name, inputs, tuple(equation.params.get("axes", ()))))

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

    def means(self, variable: Any, shares: Iterable[Any] = ()) -> Iterator[Mean]:
        """The sums over rows that a number is made of, apart from these shares of means over the global batch."""
        return (part for part in self._parts(variable, frozenset(shares), UNTOUCHED) if isinstance(part, Mean))

    def wholes(self, variable: Any, shares: Iterable[Any] = ()) -> Iterator[Whole]:
        """What is added to them in every replica alike."""
        return (part for part in self._parts(variable, frozenset(shares), UNTOUCHED) if isinstance(part, Whole))

    def _parts(self, variable: Any, shares: frozenset[Any], path: Path) -> Iterator[Mean | Whole]:
        equation = None if isinstance(variable, core.Literal) else self._of.get(variable)
        if equation is None or variable in shares:
            return
        if variable not in self._of_rows and not (equation.name in (*SAME, *SUMS) or is_scaling(equation)):
            if variable in self._of_state and size_of(variable) == 1:
                yield Whole(path.divisors, path.factors)
            return
        number = number_among(equation.inputs)
        if equation.name in (*SAME, *SUMS):
            for source in equation.inputs:
                yield from self._parts(source, shares, path)
        elif equation.name == "div":
            yield from self._parts(equation.inputs[0], shares, self._divided_by(path, equation.inputs[1]))
        elif equation.name == "mul":
            for source in equation.inputs:
                of_rows = not isinstance(source, core.Literal) and source in self._of_rows
                if of_rows or variable not in self._of_rows:  # else it is a weight of what depends on the rows
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
        return path._replace(of_replica=path.of_replica or (divisor in self._of_rows and not divisor.aval.shape))

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


def is_scaling(equation: Equation) -> bool:
    return equation.name in ("mul", "div") and any(isinstance(v, core.Literal) for v in equation.inputs)
