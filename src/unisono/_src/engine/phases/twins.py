"""Twins: one function's jaxprs for the whole batch and for a shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend import core

from unisono._src.engine.phases.kinds import Layout, Merge, list_growing_axes
from unisono._src.programs.inlining import inline_calls
from unisono._src.programs.operands import Atom, get_shape
from unisono._src.programs.private.jaxprs import list_user_lines
from unisono._src.typed_jax import make_jaxpr_and_shape
from unisono._src.typing import PyTree, Shape

OF_SHAPES = frozenset(
    [
        "shape",
        "new_sizes",
        "slice_sizes",
        "limit_indices",
        "start_indices",
        "sizes",
        "jaxpr",
        "cond_jaxpr",
        "body_jaxpr",
        "branches",
        "sharding",
        "out_sharding",
        "name",
        "linear",
        "length",
        "attributes",
        "result_avals",
    ]
)
"""Parameters that may differ between twins: shapes, which rules compare, and nested jaxprs, which are compared by themselves."""


class Equation(NamedTuple):
    """An equation of the whole batch, and the shard's in its place."""

    whole: core.JaxprEqn
    shard: core.JaxprEqn
    rows: int
    """The rows of the whole batch."""
    shard_rows: int

    @property
    def name(self) -> str:
        return self.whole.primitive.name

    @property
    def layer(self) -> str:
        """The scopes in which the equation was traced, as `model/dense`."""
        return str(self.whole.source_info.name_stack)

    def shape(self, operand: int) -> Shape:
        """The shape of an operand for the whole batch."""
        return get_shape(self.whole.invars[operand])


class Twins(NamedTuple):
    """Two traces of one function whose equations correspond."""

    equations: list[Equation]
    inputs: list[core.Var]
    outputs: list[Atom]
    constants: dict[core.Var, object]
    shapes: dict[core.Var, Shape]
    """The shard's shape of each variable of the whole batch."""
    own_constants: dict[core.Var, object]
    """The constants of the shard's jaxpr whose shape differs from that for the whole batch."""
    rows: int
    shard_rows: int

    def find_growing(self, atom: Atom) -> list[int]:
        """List the axes whose lengths depend on the number of rows."""
        return [] if isinstance(atom, core.Literal) else list_growing_axes(get_shape(atom), self.shapes[atom])

    def fits(self, atom: Atom, layout: Layout) -> bool:
        """Whether a variable has its rows as the layout says. It has them on no other axis."""
        if isinstance(atom, core.Literal) or self.find_growing(atom) != [layout.axis]:
            return False
        whole, shard = get_shape(atom)[layout.axis], self.shapes[atom][layout.axis]
        return whole == layout.per_row * self.rows and shard == layout.per_row * self.shard_rows


class ProgramsDifferError(ValueError):
    """The function has another trace for another number of rows. Its Python code branches on it."""

    def __init__(self, text: str, equation: core.JaxprEqn | None = None) -> None:
        """`equation` is the whole batch's first equation that another number of rows changes; None where it is not known."""
        super().__init__(text)
        self.equation = equation


def trace(function: Callable[..., PyTree], arguments: Sequence[PyTree]) -> tuple[core.ClosedJaxpr, PyTree]:
    """Trace a function: its jaxpr, without calls, and its outputs in shapes."""
    program, output = make_jaxpr_and_shape(function)(*arguments)
    return inline_calls(program), output


def pair(whole: core.ClosedJaxpr, shard: core.ClosedJaxpr, rows: int, shard_rows: int) -> Twins:
    """Pair two jaxprs without calls. `ProgramsDifferError` says that their equations do not correspond."""
    equations = [Equation(*both, rows, shard_rows) for both in zip(whole.eqns, shard.eqns, strict=False)]
    if len(whole.eqns) != len(shard.eqns) or not all(map(corresponds, equations)):
        first = next((equation for equation in equations if not corresponds(equation)), None)
        raise ProgramsDifferError(describe_difference(first, rows, shard_rows), first and first.whole)
    names: dict[core.Var, Atom] = dict(zip(whole.jaxpr.invars, shard.jaxpr.invars, strict=True))
    names |= zip(whole.jaxpr.constvars, shard.jaxpr.constvars, strict=True)
    for equation in equations:
        names |= zip(equation.whole.outvars, equation.shard.outvars, strict=True)
    shapes = {of_whole: get_shape(of_shard) for of_whole, of_shard in names.items()}
    constants = dict(zip(whole.jaxpr.constvars, whole.consts, strict=True))
    own = {
        variable: value
        for variable, value in zip(constants, shard.consts, strict=True)
        if shapes[variable] != get_shape(variable)
    }
    return Twins(equations, whole.jaxpr.invars, list(whole.jaxpr.outvars), constants, shapes, own, rows, shard_rows)


def leave_whole(whole: core.ClosedJaxpr, shapes: Sequence[Shape], rows: int, shard_rows: int) -> Twins:
    """Build twins of a jaxpr that cannot be cut.

    A shard has its rows, and no equation. `shapes` are those of the shard's inputs.
    """
    equations = [Equation(equation, equation, rows, shard_rows) for equation in whole.eqns]
    variables = [*whole.jaxpr.constvars, *(variable for equation in whole.eqns for variable in equation.outvars)]
    all_shapes = {variable: get_shape(variable) for variable in variables} | dict(zip(whole.jaxpr.invars, shapes, strict=True))
    constants = dict(zip(whole.jaxpr.constvars, whole.consts, strict=True))
    return Twins(equations, whole.jaxpr.invars, list(whole.jaxpr.outvars), constants, all_shapes, {}, rows, shard_rows)


def describe_difference(equation: Equation | None, rows: int, shard_rows: int) -> str:
    """Describe the first equation that another number of rows changes. It says where the code made it."""
    start = f"The function is another program for {shard_rows} rows than for {rows}"
    if equation is None:
        return f"{start}."
    lines = [": ".join(map(str, frame[:2])) for frame in list_user_lines(equation.whole)[:1]]
    return f"{start}: {equation.whole.primitive.name} and {equation.shard.primitive.name} ({', '.join(lines) or equation.layer})."


def corresponds(equation: Equation) -> bool:
    """Whether two equations correspond. They have one primitive, and literals in the same places."""
    whole, shard, *_ = equation
    are_literals = [[isinstance(atom, core.Literal) for atom in one.invars] for one in (whole, shard)]
    return whole.primitive is shard.primitive and are_literals[0] == are_literals[1]


def has_same_params(equation: Equation) -> bool:
    """Whether two equations do the same to rows. Their parameters are alike, apart from shapes."""
    whole, shard = equation.whole.params, equation.shard.params
    return whole.keys() == shard.keys() and all(
        is_alike(value, shard[name]) for name, value in whole.items() if name not in OF_SHAPES
    )


def has_same_literals(equation: Equation) -> bool:
    """Whether no literal depends on the number of rows."""
    pairs = zip(equation.whole.invars, equation.shard.invars, strict=True)
    literals = [(one.val, other.val) for one, other in pairs if isinstance(one, core.Literal) and isinstance(other, core.Literal)]
    return all(one == other or (one != one and other != other) for one, other in literals)


def is_alike(one: object, other: object) -> bool:
    """Whether two parameters say the same. Objects that are no data, such as functions and shardings, count as alike."""
    if callable(one) or isinstance(one, core.Jaxpr | core.ClosedJaxpr):
        return True
    if isinstance(one, np.ndarray | jax.Array):
        return bool(np.array_equal(one, np.asarray(other)))
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(is_alike, one, other))
    return type(one) is type(other) and (not isinstance(one, int | float | str | bool) or one == other or one != one)


def check_sizes(twins: Twins, layouts: Mapping[core.Var, Layout]) -> None:
    """Raise `ProgramsDifferError` where a shard's rows are not where the layouts say."""
    for variable in twins.shapes:
        layout = layouts.get(variable)
        if layout is not None and twins.rows != twins.shard_rows and not twins.fits(variable, layout):
            raise ProgramsDifferError(
                f"The program for {twins.shard_rows} rows has its rows on other axes than that for {twins.rows}."
            )


@dataclasses.dataclass(frozen=True)
class Planned:
    """An equation and where it is computed."""

    equation: Equation
    in_shards: bool
    """Whether each shard computes it, on its rows. Else it is computed once, as traced for the whole batch."""
    layouts: Sequence[Layout | None] = ()
    """Where the operands have rows, as shards read them."""
    merges: Sequence[Merge | None] = ()
    """How the shards' parts of each output become one value; None for what stays in the shards."""
    inside: bool = False
    """Whether it is in a layer whose values are a replica's own, and reads those of its own replica."""
    counts_locally: bool = False
    """Whether literals are those of the shard's own trace."""
