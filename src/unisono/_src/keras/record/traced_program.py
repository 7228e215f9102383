"""The equations of a traced program, in JSON. Each has the user's line and the layer that it comes from."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from unisono._src.hidden_frames import OURS
from unisono._src.keras.private.variable_paths import LiveLayers
from unisono._src.programs.private.jaxprs import close_program, list_user_lines
from unisono._src.typing import AnyArray, Json, UserObject

MOST_VALUES = 4


def list_first_values(array: AnyArray) -> list[float]:
    """List the first numbers of an array. Of random keys it lists the first numbers of their data."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.real(np.ravel(np.asarray(array))[:MOST_VALUES]).astype(np.float64).tolist()


def format_values(values: Sequence[float]) -> str:
    """Format first values as one line. It shows where there may be more.

    >>> format_values([0.1, 2.0])
    '0.1, 2'
    """
    return ", ".join(f"{value:.9g}" for value in values) + (" ..." if len(values) == MOST_VALUES else "")


Line: TypeAlias = tuple[str, int, str]
"""(file, line, function)"""

ADDRESS = re.compile(r"0x[0-9a-f]+")
LENGTH = 300
"""The longest text of a parameter."""

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

OF_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""In the paths of packages, those of another environment below this one too."""

INSTALLED = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def describe_program(program: ClosedJaxpr, layers: LiveLayers) -> list[Json]:
    """Describe the equations of a program and of those inside it. They are in order."""
    return list(iterate_descriptions(program, layers, "", None, {}))


def iterate_descriptions(
    program: ClosedJaxpr, layers: LiveLayers, scopes: str, line: Line | None, given: Mapping[Var, str]
) -> Iterator[Json]:
    """Yield the equations in JSON.

    JAX traces a function of its own once, and its equations may have no line of the user's: then they have that of the call.

    Args:
        program: The program, inside of others or not.
        layers: The layers that the names of scopes are of.
        scopes: The names of the scopes around the program.
        line: The user's line that calls it.
        given: The digests of its inputs that are constants of the programs around it.
    """
    pairs = zip(program.jaxpr.constvars, program.consts, strict=True)
    constants = {**given, **{variable: digest_constant(value) for variable, value in pairs}}
    for eqn in program.jaxpr.eqns:
        inner = "/".join(filter(None, (scopes, str(eqn.source_info.name_stack))))
        own_line = find_user_line(eqn) or line
        nested = [close_program(each) for each in list_nested(eqn)]
        described = describe_equation(eqn, {} if nested else constants)
        yield described | {"layer": layers.find_by_scopes(inner), "line": own_line}
        for each in nested:
            yield from iterate_descriptions(each, layers, inner, own_line, hand_constants(eqn, each, constants))


def hand_constants(eqn: JaxprEqn, program: ClosedJaxpr, constants: Mapping[Var, str]) -> dict[Var, str]:
    """Collect the digests of constants that an inner program gets.

    The operands of the equation are matched from the end, since it may have more in front. A constant is described where
    something is computed with it, and not at the loops and calls around.
    """
    inputs = program.jaxpr.invars
    pairs = zip(inputs, eqn.invars[max(0, len(eqn.invars) - len(inputs)) :], strict=False)
    return {variable: constants[atom] for variable, atom in pairs if isinstance(atom, Var) and atom in constants}


def find_user_line(eqn: JaxprEqn) -> Line | None:
    """Find the innermost of the user's lines behind an equation."""
    return next((line for line in list_user_lines(eqn) if is_of_user(line[0])), None)


@functools.cache
def is_of_user(file: str) -> bool:
    """Whether a file is the user's. Files of Python, of installed packages and of Unisono are not."""
    path = os.path.realpath(file)
    is_installed = path.startswith((OURS, *INSTALLED)) or any(name in path for name in OF_PACKAGES)
    return not file.startswith("<") and not is_installed


def list_nested(eqn: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    """List the programs among an equation's parameters."""
    items = [item for value in eqn.params.values() for item in (value if isinstance(value, (tuple, list)) else (value,))]
    return [item for item in items if isinstance(item, (Jaxpr, ClosedJaxpr))]


def digest_constant(value: UserObject) -> str:
    """Describe a constant by its first values and digest. A single number is given itself."""
    if isinstance(value, Tracer):
        return "traced"
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return type(value).__name__
    if array.size == 1 and array.dtype.kind in "biuf":
        return repr(array.item())
    digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()
    return f"[{format_values(list_first_values(array))}] of digest {digest}"


def describe_equation(eqn: JaxprEqn, constants: Mapping[Var, str]) -> Json:
    """Describe an equation in JSON. Of its operands only the constants are kept, since variables have no names that last."""
    return {
        "primitive": eqn.primitive.name,
        "shapes": [str(atom.aval) for atom in (*eqn.invars, *eqn.outvars)],
        "operands": [digest_constant(atom.val) if isinstance(atom, Literal) else constants.get(atom, "") for atom in eqn.invars],
        "params": {
            name: ADDRESS.sub("", str(value))[:LENGTH]
            for name, value in eqn.params.items()
            if name not in NO_PART and not callable(value)
        },
    }


def format_equation(equation: Json) -> str:
    """Format an equation as one line. It has the primitive and its shapes."""
    operands = len(equation["operands"])
    inputs, outputs = (", ".join(part) for part in (equation["shapes"][:operands], equation["shapes"][operands:]))
    return f"{equation['primitive']}({inputs}) -> {outputs}"


def format_constants(equation: Json) -> str:
    """Format the constants among an equation's operands as one line."""
    return ", ".join(filter(None, equation["operands"]))
