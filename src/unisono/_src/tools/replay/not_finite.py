"""The first value that is not finite in a replica's computation. The program is computed equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unisono._src.programs.equations import drop_names
from unisono._src.programs.inlining import inline_calls
from unisono._src.typed_jax import jaxpr_as_fun
from unisono._src.typing import AnyArray, PyTree

NAN = "NaN"
INFINITY = "infinity"


class NotFinite(NamedTuple):
    """A value that is not finite."""

    kind: str
    """`NAN` or `INFINITY`."""
    equation: core.JaxprEqn | None
    """The equation that makes it from finite values. None if the input has it."""
    argument: int | None
    """The index of the argument that has it, in the flat list of all. None if an equation makes it."""
    place: tuple[int, ...]
    """The index of its first element in the array."""
    shape: tuple[int, ...]


class Made(NamedTuple):
    """An array, and what made it."""

    value: np.ndarray | None
    """None if the array has no floating-point numbers."""
    equation: core.JaxprEqn | None
    argument: int | None
    inputs: tuple[core.Var, ...]


def find_not_finite(function: Callable[..., PyTree], args: Sequence[PyTree]) -> list[NotFinite]:
    """Find the origins of values that are not finite.

    They are in the order in which they are computed. Empty if all results are finite.

    The first is the place from which all others come. An infinity that becomes a NaN later is followed by the NaN. What does not lead to a
    result, like a mask of infinities that is taken out again, is left out.
    """
    program = inline_calls(jax.make_jaxpr(function)(*args))
    made = compute_all(program, [np.asarray(leaf) if is_number(leaf) else leaf for leaf in jax.tree.leaves(list(args))])
    bad = [atom for atom in program.jaxpr.outvars if isinstance(atom, core.Var) and find_kind(made[atom]) is not None]
    if not bad:
        return []
    return trace_back(made, bad)


def is_number(leaf: AnyArray) -> bool:
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def compute_all(program: core.ClosedJaxpr, leaves: Sequence[AnyArray]) -> dict[core.Var, Made]:
    """Compute the values of all variables of a program."""
    values: dict[core.Var, AnyArray] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(program.jaxpr.invars, leaves, strict=True))
    made = {variable: Made(read_floats(value), None, None, ()) for variable, value in values.items()}
    for number, variable in enumerate(program.jaxpr.invars):
        made[variable] = made[variable]._replace(argument=number)
    for eqn in program.jaxpr.eqns:
        operands = [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in eqn.invars]
        results = compute_equation(program.jaxpr, eqn, operands)
        inputs = tuple(atom for atom in eqn.invars if isinstance(atom, core.Var))
        for variable, result in zip(eqn.outvars, results, strict=True):
            values[variable] = result
            made[variable] = Made(read_floats(result), eqn, None, inputs)
    return made


def compute_equation(program: core.Jaxpr, eqn: core.JaxprEqn, operands: Sequence[AnyArray]) -> Sequence[AnyArray]:
    """Compute the results of one equation of a program."""
    given = {atom: value for atom, value in zip(eqn.invars, operands, strict=True) if isinstance(atom, core.Var)}
    alone = program.replace(
        constvars=[], invars=list(given), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects, debug_info=drop_names(program)
    )
    return jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*given.values())


def read_floats(value: AnyArray) -> np.ndarray | None:
    """Read an array of floating-point numbers on the host. None for other arrays."""
    if not is_number(value) or not jnp.issubdtype(value.dtype, jnp.floating):
        return None
    return np.asarray(value, np.float32) if value.dtype.itemsize < 4 else np.asarray(value)


def find_kind(made: Made) -> str | None:
    """Find whether an array holds a NaN or else an infinity. None if all values are finite."""
    if made.value is None:
        return None
    if np.isnan(made.value).any():
        return NAN
    return INFINITY if np.isinf(made.value).any() else None


def trace_back(made: dict[core.Var, Made], bad: Sequence[core.Var]) -> list[NotFinite]:
    """Trace bad results back to their origin.

    A NaN goes back to the equation that makes it. If that reads an infinity, the infinity's origin comes before it.
    """
    chain: list[NotFinite] = []
    for kind in (NAN, INFINITY):
        starts = [variable for variable in bad if find_kind(made[variable]) == kind]
        if not starts:
            continue
        origin = find_first_made(made, starts, kind)
        chain.insert(0, describe_value(made[origin], kind))
        bad = [variable for variable in made[origin].inputs if find_kind(made[variable]) == INFINITY]
    return chain


def find_first_made(made: dict[core.Var, Made], starts: Sequence[core.Var], kind: str) -> core.Var:
    """Find the first variable of this kind from which the starts come. It is the one that was computed first."""
    order = {variable: place for place, variable in enumerate(made)}
    seen: set[core.Var] = set()
    waiting = list(starts)
    while waiting:
        variable = waiting.pop()
        if variable not in seen:
            seen.add(variable)
            waiting += [each for each in made[variable].inputs if find_kind(made[each]) == kind]
    return min(seen, key=order.__getitem__)


def describe_value(made: Made, kind: str) -> NotFinite:
    assert made.value is not None
    is_such = np.isnan(made.value) if kind == NAN else np.isinf(made.value)
    place = tuple(int(index) for index in np.argwhere(is_such)[0])
    return NotFinite(kind, made.equation, made.argument, place, made.value.shape)
