"""Traced programs and their equations."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import config, core, source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.interpreters import partial_eval

from unisono._src.typed_jax import settings


def list_user_lines(eqn: JaxprEqn) -> list[tuple[str, int, str]]:
    """List (file, line, function) of an equation's frames outside of JAX.

    These frames traced the equation; the innermost comes first.
    """
    return [
        (frame.file_name, frame.start_line, frame.function_name)
        for frame in source_info_util.user_frames(eqn.source_info.traceback)
    ]


def enter_context(eqn: JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """Open an equation's context: the mesh and compute type of its trace."""
    return eqn.ctx.manager


def enter_scope(eqn: JaxprEqn, name: str) -> JaxprEqn:
    """Put an equation into one more scope."""
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=eqn.source_info.name_stack.extend(name)))


def close_program(program: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Close a nested program over its constants.

    It is passed on if it has them. Since JAX 0.11, all programs are of the class that may have them.
    """
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())


class LoopInputCounts(NamedTuple):
    """The numbers of constants and carries of a `lax.scan`. The other inputs are sliced: each step reads its own slice."""

    consts: int
    carries: int


def count_loop_inputs(params: Mapping[str, Any]) -> LoopInputCounts:
    """Count the constants and carries of a `lax.scan`, by its parameters."""
    if "ft_in" in params:  # since JAX 0.11: a tree of the inputs, by their roles
        consts, carries, _ = params["ft_in"].unpack()
        return LoopInputCounts(len(consts), len(carries))
    return LoopInputCounts(params["num_consts"], params["num_carry"])


HIGH = "call_hi_primitive"
"""The primitive of equations that stand for a program, such as that of `jnp.searchsorted`. JAX has it since 0.12."""


def expand_equation(eqn: JaxprEqn) -> ClosedJaxpr:
    """Trace the program that a `HIGH` equation stands for."""
    high: Any = eqn.params["_prim"]

    def expand(*operands: Any) -> Any:
        return jax.tree.leaves(high.expand(*jax.tree.unflatten(high.in_tree, operands)))

    return jax.make_jaxpr(expand)(*(operand.aval for operand in eqn.invars))


def drop_unneeded(program: ClosedJaxpr, is_wanted: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """Drop the equations and constants that wanted results do not need.

    The result also has, for each argument, whether it is needed.
    """
    reduced, is_needed = partial_eval.dce_jaxpr(program.jaxpr, is_wanted)
    operands = [*(operand for eqn in reduced.eqns for operand in eqn.invars), *reduced.outvars]
    read = {operand for operand in operands if not isinstance(operand, Literal)}
    constants = {
        variable: value for variable, value in zip(program.jaxpr.constvars, program.consts, strict=True) if variable in read
    }
    return ClosedJaxpr(reduced.replace(constvars=list(constants)), list(constants.values())), is_needed


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Apply an equation to operands. In a trace, its scopes and lines become those of the new equation."""
    params = eqn.primitive.get_bind_params(eqn.params)
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def get_trace_state() -> object:
    """Get a mark of the current trace. Two lines have equal marks if JAX traces both as parts of the same function."""
    return core.get_opaque_trace_state(convention="nnx")


def is_jit_disabled() -> bool:
    """Whether the user has switched compilation off. `jax.disable_jit` does, and JAX_DISABLE_JIT."""
    return bool(settings.jax_disable_jit)


def omit_source_lines() -> contextlib.AbstractContextManager[None]:
    """Open a context in which programs hold no source paths. It holds for programs that this thread traces."""
    return config.traceback_in_locations_limit(0)
