"""Traced programs with the functions that they call written out."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core

CALLS = ("jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2")
"""Primitives that call a program once, with their own operands."""


def inline_calls(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return the program with the equations of each function that it calls in place of the call."""
    constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    equations: list[core.JaxprEqn] = []

    def inline_program(
        jaxpr: core.Jaxpr, names: dict[core.Var, core.Var | core.Literal], call: core.JaxprEqn | None
    ) -> list[core.Var | core.Literal]:
        """Add the equations of a function, and return its results. `names` holds its inputs, by what they are called outside of it."""

        def find_outside(atom: core.Var | core.Literal) -> core.Var | core.Literal:
            return atom if isinstance(atom, core.Literal) else names.get(atom, atom)

        for equation in jaxpr.eqns:
            inputs = [find_outside(atom) for atom in equation.invars]
            outputs: Sequence[core.Var | core.Literal] = equation.outvars
            if call is not None:  # a function that is called twice has the same variables twice
                outputs = [core.Var(variable.aval) for variable in equation.outvars]
                stack = call.source_info.name_stack + equation.source_info.name_stack
                equation = equation.replace(source_info=equation.source_info.replace(name_stack=stack))
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr")) if equation.primitive.name in CALLS else None
            if inner is None:
                equations.append(equation.replace(invars=inputs, outvars=outputs))
            else:
                if isinstance(inner, core.ClosedJaxpr):
                    constants.update(zip(inner.jaxpr.constvars, inner.consts, strict=True))
                    inner = inner.jaxpr
                outputs = inline_program(inner, dict(zip(inner.invars, inputs, strict=True)), equation)
            names.update(zip(equation.outvars, outputs, strict=True))
        return [find_outside(atom) for atom in jaxpr.outvars]

    outputs = inline_program(program.jaxpr, {}, None)
    flat = program.jaxpr.replace(constvars=list(constants), eqns=equations, outvars=outputs)
    return core.ClosedJaxpr(flat, list(constants.values()))
