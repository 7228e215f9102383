"""The equations of a traced program, each with the user's line and the layer that it comes from, in JSON."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from unisono._src.audit.script_trace.user_lines import Place, is_of_user
from unisono._src.jax_private.jaxprs import close_program, list_user_lines
from unisono._src.typing import Json, UserObject

ADDRESS = re.compile(r"0x[0-9a-f]+")
LENGTH = 300
"""The longest text of a parameter."""

MOST_WRAPPERS = 5
"""The number of wrappers in each other that are opened to find the function of a callback."""

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
"""Parameters that are programs, which stand in the list themselves, or names."""


def describe_program(program: ClosedJaxpr) -> list[Json]:
    """Return the equations of a program and of the programs inside it, in order."""
    return list(iterate_descriptions(program, "", []))


def iterate_descriptions(program: ClosedJaxpr, scopes: str, lines: Sequence[Place]) -> Iterator[Json]:
    """Yield the equations in JSON. `scopes` are the names of the scopes around the program, `lines` the user's lines that call it.

    JAX traces a function of its own once, and its equations may have no line of the user's: then they have those of the call.
    """
    constants = {
        variable: digest_constant(value) for variable, value in zip(program.jaxpr.constvars, program.consts, strict=True)
    }
    for eqn in program.jaxpr.eqns:
        inner = "/".join(filter(None, (scopes, str(eqn.source_info.name_stack))))
        own_lines = list_places(eqn) or lines
        yield describe_equation(eqn, constants, inner, own_lines)
        for nested in list_nested(eqn):
            yield from iterate_descriptions(close_program(nested), inner, own_lines)


def list_places(eqn: JaxprEqn) -> list[Place]:
    """Return the user's lines that an equation comes from, the innermost first."""
    return [place for place in list_user_lines(eqn) if is_of_user(place[0])]


def list_nested(eqn: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    """Return the programs among the parameters of an equation."""
    items = [item for value in eqn.params.values() for item in (value if isinstance(value, (tuple, list)) else (value,))]
    return [item for item in items if isinstance(item, (Jaxpr, ClosedJaxpr))]


def digest_constant(value: UserObject) -> str:
    """Return the digest of a constant; of a single number the number itself."""
    if isinstance(value, Tracer):
        return "traced"
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return type(value).__name__
    if array.size == 1 and array.dtype.kind in "biuf":
        return repr(array.item())
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


def describe_equation(eqn: JaxprEqn, constants: Mapping[Var, str], scopes: str, lines: Sequence[Place]) -> Json:
    """Return an equation in JSON: of its operands the constants alone, since variables have no names that last."""
    params = {
        name: ADDRESS.sub("", str(value))[:LENGTH]
        for name, value in eqn.params.items()
        if name not in NO_PART and not callable(value)
    }
    return {
        "primitive": eqn.primitive.name,
        "shapes": [str(atom.aval) for atom in (*eqn.invars, *eqn.outvars)],
        "operands": [digest_constant(atom.val) if isinstance(atom, Literal) else constants.get(atom, "") for atom in eqn.invars],
        "params": params,
        "scopes": scopes,
        "lines": lines,
        "callbacks": list_called_back(eqn.params.get("callback")) if "callback" in eqn.primitive.name else [],
    }


def list_called_back(callback: UserObject, depth: int = 0) -> list[Place]:
    """Return the first line of the user's function that a callback calls, however it is wrapped; nothing where it calls none."""
    callback = getattr(callback, "__func__", callback)
    code = getattr(callback, "__code__", None)
    if code is not None and is_of_user(code.co_filename):
        return [(code.co_filename, code.co_firstlineno, code.co_name)]
    if depth > MOST_WRAPPERS:
        return []
    inner = [
        *getattr(callback, "__dict__", {}).values(),
        *(getattr(callback, name, None) for name in ("func", "callback_func", "__wrapped__")),
        *(cell.cell_contents for cell in getattr(callback, "__closure__", None) or ()),
    ]
    return next(filter(None, (list_called_back(item, depth + 1) for item in inner if callable(item))), [])
