"""The equations of a traced program, each with the user's line and the layer that it comes from, in JSON."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from unisono._src.jax_private.jaxprs import close_program, list_user_lines
from unisono._src.typing import Json

ADDRESS = re.compile(r"0x[0-9a-f]+")
LENGTH = 300
NO_PART = (
    "jaxpr",
    "call_jaxpr",
    "fun_jaxpr",
    "branches",
    "body_jaxpr",
    "cond_jaxpr",
    "jvp_jaxpr_fun",
    "fwd_jaxpr_thunk",
    "bwd",
    "name",
)


def describe_program(program: ClosedJaxpr, is_of_user: Callable[[str], bool]) -> list[Json]:
    """Return the equations of a program and of the programs inside it, in order."""
    return [describe_equation(eqn, known, stack, is_of_user) for eqn, known, stack in iterate_equations(program, "")]


def iterate_equations(program: ClosedJaxpr, stack: str) -> Iterator[tuple[JaxprEqn, dict[Any, str], str]]:
    """Yield (an equation, the digests of the program's constants, the names of the scopes around)."""
    known = {variable: digest_constant(value) for variable, value in zip(program.jaxpr.constvars, program.consts, strict=True)}
    for eqn in program.jaxpr.eqns:
        inner = "/".join(filter(None, (stack, str(eqn.source_info.name_stack))))
        yield eqn, known, inner
        for nested in list_nested(eqn.params):
            yield from iterate_equations(close_program(nested), inner)


def list_nested(params: Any) -> list[Jaxpr | ClosedJaxpr]:
    """Return the programs among the parameters of an equation."""
    found: list[Jaxpr | ClosedJaxpr] = []
    for value in params.values():
        items = value if isinstance(value, (tuple, list)) else (value,)
        found += [item for item in items if isinstance(item, (Jaxpr, ClosedJaxpr))]
    return found


def digest_constant(value: Any) -> str:
    if isinstance(value, Tracer):
        return "traced"
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return type(value).__name__
    if array.size == 1 and array.dtype.kind in "biuf":
        return repr(array.item())
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


def describe_equation(eqn: JaxprEqn, known: dict[Any, str], stack: str, is_of_user: Callable[[str], bool]) -> Json:
    operands = [digest_constant(atom.val) if isinstance(atom, Literal) else known.get(atom, "") for atom in eqn.invars]
    params = {
        name: ADDRESS.sub("", str(value))[:LENGTH]
        for name, value in eqn.params.items()
        if name not in NO_PART and not callable(value)
    }
    shapes = [str(atom.aval) for atom in (*eqn.invars, *eqn.outvars)]
    lines = [place for place in list_user_lines(eqn) if is_of_user(place[0])]
    callbacks = [] if "callback" not in eqn.primitive.name else find_functions(eqn.params.get("callback"), is_of_user)
    return {
        "primitive": eqn.primitive.name,
        "shapes": shapes,
        "operands": operands,
        "params": params,
        "scopes": stack,
        "lines": lines,
        "callbacks": callbacks,
    }


def find_functions(value: Any, is_of_user: Callable[[str], bool], depth: int = 0) -> list[Json]:
    """Return (file, first line, name) of the user's functions that a callback calls, however it is wrapped."""
    value = getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)
    if code is not None and is_of_user(code.co_filename):
        return [(code.co_filename, code.co_firstlineno, code.co_name)]
    if depth > 5:
        return []
    inner = list(getattr(value, "__dict__", {}).values()) + [
        getattr(value, name, None) for name in ("func", "callback_func", "__wrapped__")
    ]
    inner += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    return next(filter(None, (find_functions(item, is_of_user, depth + 1) for item in inner if callable(item))), [])
