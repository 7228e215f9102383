"""The origin of a difference: from the line in which two runs part back to the line from which the difference comes."""

from __future__ import annotations

import ast
import dataclasses

from unisono._src.audit.cause import Cause
from unisono._src.audit.script_trace.line_trace import HANDED, RETURNED
from unisono._src.audit.source_code import (
    SourceFile,
    list_assigned_attributes,
    list_assigned_names,
    list_heads,
    list_read_names,
    read_source,
    spell_last_name,
)
from unisono._src.audit.suspects import find_suspect
from unisono._src.audit.trace_comparison import Place, ProcessTrace, TraceComparison

MODULE = "<module>"
MOST_LINES = 50
LAYER_METHODS = ("call", "__call__")


@dataclasses.dataclass(frozen=True)
class Origin:
    """The line from which a difference comes."""

    place: Place
    cause: Cause | None
    outside: Place | None = None
    """The line outside of the function from which the value comes, where there is one."""


def find_origin(comparison: TraceComparison, begin: Place, visited: set[Place] | None = None) -> Origin:
    """Go back from a line through the lines that gave it other values, and return the first of them in the same scope.

    `visited` are lines on the way to this one.
    """
    place = begin
    visited = set() if visited is None else visited
    for _ in range(MOST_LINES):
        visited.add(place)
        kept = find_kept_state(place)
        if kept is not None:
            return Origin(kept, Cause.LAYER_STATE)
        cause = suspect_line(comparison, place)
        if cause not in (None, Cause.HOST_RANDOM):  # what a generator draws comes from where it was made
            return Origin(place, cause)
        inside = [each for each in list_inputs(comparison, place) if each not in visited]
        if not inside:
            return settle_origin(comparison, place, visited)
        place = min(inside, key=comparison.order.__getitem__)
    return settle_origin(comparison, place, visited)


def settle_origin(comparison: TraceComparison, place: Place, visited: set[Place]) -> Origin:
    """Return the origin at a line to which nothing of its own scope gave other values."""
    cause = suspect_line(comparison, place)
    if cause not in (None, Cause.HOST_RANDOM):
        return Origin(place, cause)
    if place in comparison.in_one_only:
        condition = find_condition(place)
        if condition is not None:
            return settle_origin(comparison, condition, visited)
    outside = [each for each in list_outside_inputs(comparison, place) if each not in visited]
    if outside:
        source = min(outside, key=comparison.order.__getitem__)
        return Origin(place, find_origin(comparison, source, visited).cause or cause, source)
    if cause is not None:
        return Origin(place, cause)
    return find_in_called(comparison, place) or find_behind_unknown(comparison, place, visited) or Origin(place, None)


def find_condition(place: Place) -> Place | None:
    """Return the line of the innermost condition or loop around a line; None where there is none in its function."""
    line = read_source(place.file).find_condition(place.line)
    return None if line is None else Place(place.file, line, place.function)


def list_branches(comparison: TraceComparison) -> list[Place]:
    """Return the lines that only one run has come to, though both have come to their condition, in order."""
    branches = [place for place in comparison.in_one_only if find_condition(place) in comparison.in_both]
    return sorted(branches, key=comparison.order.__getitem__)


def find_file_origin(trace: ProcessTrace) -> Origin | None:
    """Return the first line that read a file and got a value from it; None where there is none."""
    for place, entry in trace.lines.items():
        if entry["values"] and find_suspect(read_source(place.file).find_expressions(place.line)) is Cause.FILES:
            return Origin(place, Cause.FILES)
    return None


def find_behind_unknown(comparison: TraceComparison, place: Place, visited: set[Place]) -> Origin | None:
    """Return the origin of what a line reads and whose value no digest tells, such as a layer: at the line that made it."""
    source = read_source(place.file)
    names = set(list_read_names(source.find_expressions(place.line)))
    for made in comparison.order:
        is_earlier = made.file == place.file and made.line != place.line and comparison.order[made] <= comparison.order[place]
        if made not in visited and is_earlier and assigns_unknown(source, made, place, names):
            visited.add(made)
            origin = settle_inside(comparison, made, visited)
            if origin is not None:
                return origin
    return None


def assigns_unknown(source: SourceFile, made: Place, place: Place, names: set[str]) -> bool:
    """Return whether a line gives a value to a name, or to an attribute of the class, that another line reads."""
    statement = source.find_statement(made.line)
    if statement is None:
        return False
    if is_same_class(made, place) and list_assigned_attributes(statement) & names:
        return True
    return is_same_scope(made, place) and bool(list_assigned_names(statement) & names)


def settle_inside(comparison: TraceComparison, place: Place, visited: set[Place]) -> Origin | None:
    """Return the origin of what a line reads; None where none of it has a cause."""
    inside = [each for each in list_inputs(comparison, place) if each not in visited]
    origins = (find_origin(comparison, each, visited) for each in sorted(inside, key=comparison.order.__getitem__))
    return next((origin for origin in origins if origin.cause is not None), None)


def suspect_line(comparison: TraceComparison, place: Place) -> Cause | None:
    return find_suspect(read_source(place.file).find_expressions(place.line), comparison.sets)


def list_inputs(comparison: TraceComparison, place: Place) -> list[Place]:
    """Return the lines of its own scope that gave other values to what a line reads; the callers of its function where there are none."""
    source = read_source(place.file)
    names = list_read_names(source.find_expressions(place.line))
    inputs = [other for other in list_other_places(comparison, place) if is_input(comparison, source, other, place, names)]
    if not inputs and place.function != MODULE:
        return list_callers(comparison, source, place, names)
    return inputs


def list_outside_inputs(comparison: TraceComparison, place: Place) -> list[Place]:
    """Return the lines of the module around that gave other values to what a line of a function reads."""
    source = read_source(place.file)
    names = list_read_names(source.find_expressions(place.line))
    return [
        other
        for other in list_other_places(comparison, place)
        if other.function == MODULE
        and comparison.list_differing_names(other) & set(names)
        and not is_input(comparison, source, other, place, names)
    ]


def list_other_places(comparison: TraceComparison, place: Place) -> list[Place]:
    """Return the other lines of a line's file whose values differ, and not only after its own."""
    differing = comparison.list_differing_places()
    return [
        other for other in differing if other.file == place.file and other != place and comparison.could_precede(other, place)
    ]


def is_input(comparison: TraceComparison, source: SourceFile, other: Place, place: Place, names: list[str]) -> bool:
    """Return whether a line gives another value to a name that a line of its scope reads, or to an attribute that one of its class reads, or
    is the end of a function that the line names."""
    differing = comparison.list_differing_names(other)
    if differing & {RETURNED, HANDED} and is_named(source, other.function, names):
        return True
    if is_same_scope(other, place):
        return not differing.isdisjoint(names)
    return is_same_class(other, place) and any(name in differing for name in names if name.startswith("self."))


def list_callers(comparison: TraceComparison, source: SourceFile, place: Place, names: list[str]) -> list[Place]:
    """Return the lines that called the function of a line, where what they passed differs."""
    function = source.find_enclosing_function(place.line)
    if function is None:
        return []
    heads = (function.lineno, *(decorator.lineno for decorator in function.decorator_list))
    begins = [each for each in comparison.list_differing_places() if each.function == place.function and each.line in heads]
    passed = [each for each in begins if each.file == place.file and comparison.could_precede(each, place)]
    if not any(comparison.list_differing_names(each) & set(names) for each in passed):
        return []
    return [
        each
        for each in comparison.order
        if each.file == place.file and each.function != place.function and function.name in list_called(source, each.line)
    ]


def list_called(source: SourceFile, line: int) -> set[str]:
    nodes = [node for expression in source.find_expressions(line) for node in ast.walk(expression)]
    return {spell_last_name(node.func) for node in nodes if isinstance(node, ast.Call)}


def is_same_scope(one: Place, other: Place) -> bool:
    """Return whether two lines are of one function; comprehensions and lambdas are parts of the function around."""
    return strip_comprehensions(one.function) == strip_comprehensions(other.function)


def strip_comprehensions(function: str) -> str:
    parts = function.split(".")
    while len(parts) > 1 and (parts[-1].startswith("<") or parts[-1] == "<locals>"):
        parts.pop()
    return MODULE if len(parts) == 1 and parts[0].startswith("<") else ".".join(parts)


def is_same_class(one: Place, other: Place) -> bool:
    ours, theirs = (strip_comprehensions(place.function).rpartition(".")[0] for place in (one, other))
    return bool(ours) and ours == theirs


def is_named(source: SourceFile, function: str, names: list[str]) -> bool:
    """Return whether a function of the user's is among the names that a line reads."""
    bare = strip_comprehensions(function).rpartition(".")[2]
    return bare in names or f"self.{bare}" in names


def find_kept_state(place: Place) -> Place | None:
    """Return the line in which a layer's `call` changes an attribute that the line reads or changes itself; None where there is none."""
    source = read_source(place.file)
    function = source.find_enclosing_function(place.line)
    if function is None or function.name not in LAYER_METHODS:
        return None
    names = set(list_read_names(source.find_expressions(place.line)))
    for statement in source.iterate_statements(function):
        if list_assigned_attributes(statement) & names and not hasattr(statement, "body"):
            return Place(place.file, statement.lineno, place.function)
    return None


def find_in_called(comparison: TraceComparison, place: Place) -> Origin | None:
    """Return the first suspicious line in a function of the user's that a line calls or passes on."""
    source = read_source(place.file)
    for name in list_read_names(source.find_expressions(place.line)):
        function = source.find_function(name.removeprefix("self."))
        if function is not None:
            origin = find_in_function(source, function, comparison.sets)
            if origin is not None:
                return origin
    return None


def find_in_function(source: SourceFile, function: ast.AST, sets: set[str]) -> Origin | None:
    """Return the first suspicious line of a function."""
    for statement in source.iterate_statements(function):
        cause = find_suspect(list_heads(statement), sets)
        if cause is not None:
            return Origin(Place(source.path, statement.lineno, getattr(function, "name", "")), cause)
    return None


def find_in_callback(file: str, line: int, sets: set[str]) -> Origin | None:
    """Return the line of a callback that keeps state of its own, or draws what another run does not draw."""
    source = read_source(file)
    function = source.find_function_at(line)
    if function is None:
        return None
    origin = find_in_function(source, function, sets)
    if origin is not None:
        return origin
    for statement in source.iterate_statements(function):
        if not hasattr(statement, "body") and list_assigned_attributes(statement):
            return Origin(Place(file, statement.lineno, function.name), Cause.LAYER_STATE)
    return None
