"""Traced programs with their calls inlined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from jax.extend import core

from unisono._src.programs.operands import Atom
from unisono._src.programs.private.jaxprs import HIGH, expand_equation
from unisono._src.typed_jax import make_jaxpr, optimization_barrier

CALLS = ("jit", "closed_call", "core_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call", "remat2")
"""Primitives that call a program once, with their own operands."""
SOLVE = "custom_linear_solve"
"""The primitive of a linear system. It calls one of four programs, which solve the system and its derivatives."""

SHORT = 16
"""The most equations of a short function."""

Constants: TypeAlias = dict[core.Var, object]


def inline_calls(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Inline all functions that a program calls."""
    constants: Constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    flat = write_out(program.jaxpr, lambda _: True, constants)
    return core.ClosedJaxpr(flat.replace(constvars=list(constants)), list(constants.values()))


def inline_short_calls(program: core.Jaxpr) -> core.Jaxpr:
    """Inline the short jitted functions that a program calls."""

    def is_short(call: core.JaxprEqn) -> bool:
        if call.primitive.name != "jit":
            return False
        inner: core.ClosedJaxpr = call.params["jaxpr"]
        return len(inner.jaxpr.eqns) <= SHORT and not inner.consts

    return write_out(program, is_short, {})


def write_out(program: core.Jaxpr, is_inlined: Callable[[core.JaxprEqn], bool], constants: Constants) -> core.Jaxpr:
    """Inline some of the functions that a program calls.

    The constants of these functions are added to `constants`.
    """
    equations: list[core.JaxprEqn] = []

    def add_equations(jaxpr: core.Jaxpr, names: dict[core.Var, Atom], call: core.JaxprEqn | None) -> list[Atom]:
        """Add the equations of a function; the result has its outputs. `names` maps its inputs to their names outside of it."""

        def find_outside(atom: Atom) -> Atom:
            return atom if isinstance(atom, core.Literal) else names.get(atom, atom)

        for equation in jaxpr.eqns:
            inputs = [find_outside(atom) for atom in equation.invars]
            outputs: Sequence[Atom] = equation.outvars
            if call is not None:  # a function that is called twice has the same variables twice
                outputs = [core.Var(variable.aval) for variable in equation.outvars]
                stack = call.source_info.name_stack + equation.source_info.name_stack
                equation = equation.replace(source_info=equation.source_info.replace(name_stack=stack))
            inner, operands = find_called(equation, inputs)
            if inner is None or not is_inlined(equation):
                equations.append(equation.replace(invars=inputs, outvars=outputs))
            else:
                if isinstance(inner, core.ClosedJaxpr):
                    constants.update(zip(inner.jaxpr.constvars, inner.consts, strict=True))
                    inner = inner.jaxpr
                if equation.params.get("differentiated") and equation.params.get("prevent_cse"):
                    operands = [keep_apart(operand, equation, equations) for operand in operands]
                outputs = add_equations(inner, dict(zip(inner.invars, operands, strict=True)), equation)
            names.update(zip(equation.outvars, outputs, strict=True))
        return [find_outside(atom) for atom in jaxpr.outvars]

    outputs = add_equations(program, {}, None)
    return program.replace(eqns=equations, outvars=outputs)


def find_called(equation: core.JaxprEqn, inputs: list[Atom]) -> tuple[core.Jaxpr | core.ClosedJaxpr | None, list[Atom]]:
    """Find the program that an equation calls once, and its operands.

    They are among the operands of the equation. None if it calls none.
    """
    if equation.primitive.name in CALLS:
        return equation.params.get("jaxpr", equation.params.get("call_jaxpr")), inputs
    if equation.primitive.name == HIGH:
        return expand_equation(equation), inputs
    if equation.primitive.name == SOLVE:
        lengths = equation.params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        return equation.params["jaxprs"].solve, [*inputs[first : first + lengths.solve], *inputs[sum(lengths) :]]
    return None, inputs


def keep_apart(operand: Atom, call: core.JaxprEqn, equations: list[core.JaxprEqn]) -> Atom:
    """Put an operand behind a barrier. What `jax.checkpoint` computes again must not be taken from what was computed before."""
    if isinstance(operand, core.Literal):
        return operand
    (barrier,) = make_jaxpr(optimization_barrier)(operand.aval).eqns
    behind = core.Var(operand.aval)
    equations.append(barrier.replace(invars=[operand], outvars=[behind], source_info=call.source_info, ctx=call.ctx))
    return behind
