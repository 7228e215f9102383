"""The places of a step's program in which R matters: what is computed over a replica's rows is not what is computed over the whole batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from unisono._src.audit.audit_report import Coupling
from unisono._src.audit.cause import Cause
from unisono._src.audit.cause_words import WORDS
from unisono._src.audit.program_comparison import read_layer
from unisono._src.audit.source_code import list_read_names, quote_line, read_source, spell_last_name, spell_name
from unisono._src.audit.trace_comparison import Place, ProcessTrace
from unisono._src.typing import Json

OVER_ROWS = (
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "argmax",
    "argmin",
    "sort",
    "cumsum",
    "cummax",
    "cumprod",
    "rev",
    "dot_general",
)
RANDOM = ("random_bits", "threefry2x32", "random_unwrap", "random_wrap", "random_seed", "random_fold_in")
SUMMING = ("reduce_sum", "convert_element_type", "broadcast_in_dim", "reshape")
NOT_LINEAR = ("sqrt", "rsqrt", "integer_pow", "pow", "square", "min", "max", "sign", "clamp", "div")


def make_coupling(layer: str | None, cause: Cause, place: Place | None) -> Coupling:
    words = WORDS[cause]
    return Coupling(layer, cause, words.cause, words.instead, None if place is None else quote_line(place))


def list_couplings(trace: ProcessTrace, whole: ProcessTrace) -> tuple[Coupling, ...]:
    """Return the places in which R matters, each layer and line once.

    Args:
        trace: The trace of a run with R = n.
        whole: That of a run with R = 1.
    """
    programs = [program["equations"] for program in trace.content["programs"]]
    rows = max((len(shard) for step in trace.content["rows"] for shard in step), default=0)
    batch = max((sum(map(len, step)) for step in whole.content["rows"]), default=0)
    couplings = [coupling for equations in programs for coupling in iterate_couplings(trace, equations, rows, batch)]
    if all(coupling.cause is Cause.RANDOM_LAYER for coupling in couplings):
        couplings += find_nonlinear_line([equation for equations in programs for equation in equations])
    unique = {(coupling.layer, coupling.cause, coupling.source): coupling for coupling in couplings}
    return tuple(unique.values())


def iterate_couplings(trace: ProcessTrace, equations: Sequence[Json], rows: int, batch: int) -> Iterator[Coupling]:
    mean = find_mean(equations)
    for index, equation in enumerate(equations):
        if is_of_backward_pass(equation):
            continue
        layer = read_layer(equation["scopes"], trace.content["layers"])
        if equation["primitive"] in RANDOM:
            if layer is not None:
                yield make_coupling(layer, Cause.RANDOM_LAYER, find_line(trace, equation, layer))
        elif layer is None and index in mean:
            continue  # the mean of the replicas' means is the mean of the whole batch
        elif is_over_rows(equation, rows) or has_row_count(equation, rows, batch):
            place = find_line(trace, equation, layer)
            if layer is not None or place not in (None, find_call(trace)):
                yield make_coupling(layer, name_cause(layer, place), place)


def is_of_backward_pass(equation: Json) -> bool:
    return "transpose" in equation["scopes"]


def find_mean(equations: Sequence[Json]) -> set[int]:
    """Return the equations with which the forward pass ends, if they add up a loss and divide the sum by a number."""
    mean: set[int] = set()
    is_divided = False
    for index in reversed(range(len(equations))):
        equation = equations[index]
        if "jvp" not in equation["scopes"] or is_of_backward_pass(equation):
            continue
        is_scaled = equation["primitive"] in ("mul", "div") and any(equation["operands"])
        if not is_scaled and equation["primitive"] not in SUMMING:
            break
        is_divided = is_divided or is_scaled
        mean.add(index)
    return mean if is_divided else set()


def is_over_rows(equation: Json, rows: int) -> bool:
    """Return whether an equation adds, compares or sorts along the axis of the rows."""
    shape = read_shape(equation["shapes"][0]) if equation["shapes"] else []
    if equation["primitive"] not in OVER_ROWS or not shape or shape[0] != rows:
        return False
    params = equation["params"]
    if equation["primitive"] == "dot_general":
        contracted = re.match(r"\(\(\(([\d, ]*)\), \(([\d, ]*)\)\)", params.get("dimension_numbers", ""))
        return contracted is not None and "0" in re.findall(r"\d+", contracted[1])
    axes = params.get("axes", params.get("axis", params.get("dimension", params.get("dimensions", ""))))
    return "0" in re.findall(r"\d+", axes)


def has_row_count(equation: Json, rows: int, batch: int) -> bool:
    """Return whether an equation computes with the number of rows as a constant: it is another one for R = 1."""
    return rows != batch and rows > 1 and f"{float(rows)}" in equation["operands"] and bool(equation["lines"])


def read_shape(text: str) -> list[int]:
    """Return the sizes in a type such as float32[6,12]."""
    inner = re.search(r"\[([\d,]+)\]", text)
    return [int(size) for size in inner[1].split(",") if size] if inner else []


def find_line(trace: ProcessTrace, equation: Json, layer: str | None) -> Place | None:
    """Return the user's line of an equation. Of a layer that Keras calls it is the line that made the layer."""
    call = find_call(trace)
    places = [Place(*place) for place in equation["lines"]]
    if places and places[0] != call:
        return find_row_count(places[0]) or places[0]
    made = [
        event
        for event in trace.content["variables"]
        if layer is not None and f"/{layer}/" in f"/{event['path']}" and event["action"] == "made"
    ]
    return Place(*made[0]["places"][0]) if made else next(iter(places), None)


def find_row_count(place: Place) -> Place | None:
    """Return the line that counts the rows, where a line of the same function reads its result; None where there is none."""
    source = read_source(place.file)
    function = source.find_enclosing_function(place.line)
    names = set(list_read_names(source.find_expressions(place.line)))
    for statement in () if function is None else source.iterate_statements(function):
        if isinstance(statement, ast.Assign) and {spell_name(target) for target in statement.targets} & names:
            read = {spell_last_name(node) for node in ast.walk(statement.value)}
            if read & {"shape", "len"}:
                return Place(place.file, statement.lineno, place.function)
    return None


def find_call(trace: ProcessTrace) -> Place | None:
    """Return the line that calls `fit`, or the first step."""
    return next(iter(trace.list_call_places(0)), None)


def name_cause(layer: str | None, place: Place | None) -> Cause:
    """Return what a computation over rows is: a quotient of sums, a loss, or a layer's statistics."""
    if place is None:
        return Cause.BATCH_STATISTICS
    source = read_source(place.file)
    if layer is None:
        return Cause.WEIGHTING if has_quotient_of_sums(source.find_expressions(place.line)) else Cause.BATCH_LOSS
    function = source.find_enclosing_function(place.line)
    nodes = [] if function is None else list(ast.walk(function))
    adds_loss = any(isinstance(node, ast.Call) and spell_name(node.func).endswith("add_loss") for node in nodes)
    return Cause.BATCH_LOSS if adds_loss else Cause.BATCH_STATISTICS


def has_quotient_of_sums(expressions: Sequence[ast.AST]) -> bool:
    """Return whether something is divided by a sum."""
    quotients = [
        node for each in expressions for node in ast.walk(each) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    ]
    sums = [node for quotient in quotients for node in ast.walk(quotient.right) if isinstance(node, ast.Call)]
    return any(spell_last_name(node.func) in ("sum", "count_nonzero", "maximum") for node in sums)


def find_nonlinear_line(equations: Sequence[Json]) -> list[Coupling]:
    """Return the first line of the user's that computes with gradients what is not linear in them: a length, a bound."""
    for equation in equations:
        if equation["primitive"] in NOT_LINEAR and equation["lines"] and "jvp" not in equation["scopes"]:
            return [make_coupling(None, Cause.WEIGHTING, Place(*equation["lines"][0]))]
    return []
