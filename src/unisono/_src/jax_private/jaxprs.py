"""Traced programs and their equations."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.interpreters import partial_eval


def enter_context(eqn: JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """Return a context with the mesh and the compute type that were set where an equation was traced."""
    return eqn.ctx.manager


def drop_unneeded(program: ClosedJaxpr, is_wanted: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """Return the program without equations and constants that the wanted results do not need, and whether they need each argument."""
    reduced, is_needed = partial_eval.dce_jaxpr(program.jaxpr, is_wanted)
    operands = [*(operand for eqn in reduced.eqns for operand in eqn.invars), *reduced.outvars]
    read = {operand for operand in operands if not isinstance(operand, Literal)}
    constants = {
        variable: value for variable, value in zip(program.jaxpr.constvars, program.consts, strict=True) if variable in read
    }
    return ClosedJaxpr(reduced.replace(constvars=list(constants)), list(constants.values())), is_needed
