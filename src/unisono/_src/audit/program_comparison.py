"""Two traced programs beside each other: the first equation that differs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from unisono._src.audit.trace_comparison import Place, ProcessTrace
from unisono._src.typing import Json

COMPARED = ("primitive", "operands", "params", "shapes")
COLLECTIVES = ("psum", "all_gather", "ppermute", "all_to_all", "reduce_scatter")
TRANSFORMS = re.compile(
    r"\b(jvp|transpose|vmap|jit|checkpoint|rematted_computation|while|body|cond|branch_\d+_fun|closed_call)\b"
)


@dataclasses.dataclass(frozen=True)
class EquationDifference:
    """The first equation in which two programs differ."""

    equation: Json
    other: Json
    """The equation of the other program."""
    has_other_shapes: bool
    place: Place | None
    """The user's line that the equation comes from, or the nearest such line before it."""


def find_equation(one: ProcessTrace, other: ProcessTrace, step: int) -> EquationDifference | None:
    """Return the first equation that differs in the programs that were traced up to a step; None where all are the same."""
    ones = [program for program in one.content["programs"] if program["step"] <= step]
    others = [program for program in other.content["programs"] if program["step"] <= step]
    for mine, its in pair_programs(ones, others):
        difference = compare_equations(mine["equations"], its["equations"])
        if difference is not None:
            return difference
    return None


def pair_programs(ones: Sequence[Json], others: Sequence[Json]) -> list[tuple[Json, Json]]:
    """Return pairs of programs to compare: those of the same shapes, then the others in order.

    A process traces programs for its own replicas alone, which may have fewer rows than those of another process.
    """
    left = list(ones)
    pairs: list[tuple[Json, Json]] = []
    unpaired: list[Json] = []
    for its in others:
        mine = next((each for each in left if list_equation_shapes(each) == list_equation_shapes(its)), None)
        if mine is None:
            unpaired.append(its)
        else:
            left.remove(mine)
            pairs.append((mine, its))
    return pairs + list(zip(left, unpaired, strict=False))


def list_equation_shapes(program: Json) -> list[list[str]]:
    return [equation["shapes"] for equation in program["equations"]]


def compare_equations(ones: Sequence[Json], others: Sequence[Json]) -> EquationDifference | None:
    """Return the first equation that differs. Where the shapes of the rows differ throughout, an equation of the user's comes first."""
    differing = [
        (index, mine, its)
        for index, (mine, its) in enumerate(zip(ones, others, strict=False))
        if any(mine[part] != its[part] for part in COMPARED)
    ]
    if not differing:
        return None
    index, mine, its = next((each for each in differing if each[1]["lines"]), differing[0])
    lines = mine["lines"] or next((each["lines"] for each in reversed(ones[:index]) if each["lines"]), [])
    return EquationDifference(mine, its, mine["shapes"] != its["shapes"], Place(*lines[0]) if lines else None)


def list_callback_equations(trace: ProcessTrace) -> list[Json]:
    """Return the equations that call functions of the user's back, or add over devices, in the programs that were traced."""
    return [
        equation
        for program in trace.content["programs"]
        for equation in program["equations"]
        if equation["callbacks"] or equation["primitive"] in COLLECTIVES
    ]


def format_equation(equation: Json) -> str:
    """Return an equation as one line: the primitive, the constants among its operands, its shapes."""
    constants = [operand for operand in equation["operands"] if operand]
    operands = len(equation["operands"])
    shapes = equation["shapes"]
    inputs = ", ".join(shapes[:operands])
    outputs = ", ".join(shapes[operands:])
    text = f"{equation['primitive']}({inputs}) -> {outputs}"
    return text + (f", with {', '.join(constants)}" if constants else "")


def read_layer(scopes: str, layers: Sequence[Json]) -> str | None:
    """Return the layer that the names of scopes stand for, from the model down, without the model's own name."""
    parts = [part for part in re.split(r"[/()]", TRANSFORMS.sub("", scopes)) if part]
    return find_layer("/".join(parts), layers)


def find_layer(path: str, layers: Sequence[Json]) -> str | None:
    """Return the innermost layer on a path; None where there is none but models."""
    models = {layer["path"] for layer in layers if layer["is_model"]}
    inner = {strip_model(layer["path"], models) for layer in layers if not layer["is_model"]}
    parts = path.split("/")
    if parts[0] in models:
        parts = parts[1:]
    for end in range(len(parts), 0, -1):
        if "/".join(parts[:end]) in inner:
            return "/".join(parts[:end])
    return None


def find_layer_of_variable(path: str, layers: Sequence[Json]) -> str | None:
    """Return the innermost layer that has a variable; None where there is none but models."""
    models = {layer["path"] for layer in layers if layer["is_model"]}
    owners = [strip_model(layer["path"], models) for layer in layers if path in layer["strays"]]
    return find_layer(path, layers) or max(owners, key=lambda owner: owner.count("/"), default=None)


def strip_model(path: str, models: set[str]) -> str:
    first, _, rest = path.partition("/")
    return rest if first in models and rest else path
