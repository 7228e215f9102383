"""The explanation of a difference: both runs are repeated while their lines are noted, and the difference is followed back to its origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from unisono._src.audit.audit_report import Difference
from unisono._src.audit.cause import Cause
from unisono._src.audit.cause_words import FAILED, NO_SEED, OTHER_SCRIPT, WORDS, CauseWords
from unisono._src.audit.difference_kinds import ENTRY, EXIT, ROWS
from unisono._src.audit.origin import Origin, find_file_origin, find_in_callback, find_origin, list_branches
from unisono._src.audit.program_comparison import (
    EquationDifference,
    find_equation,
    find_layer_of_variable,
    format_equation,
    list_callback_equations,
    read_layer,
)
from unisono._src.audit.record_comparison import RecordDifference
from unisono._src.audit.repeated_runs import Say, has_bits_of_other, read_traced, repeat_traced
from unisono._src.audit.script_run import FinishedRun, ScriptRunner, find_last_lines
from unisono._src.audit.script_trace.line_trace import HANDED
from unisono._src.audit.source_code import quote_line
from unisono._src.audit.trace_comparison import Place, ProcessTrace, TraceComparison
from unisono._src.typing import Json


@dataclasses.dataclass(frozen=True)
class TracedDifference:
    """A difference that was followed back, as far as the traces show it."""

    origin: Origin | None = None
    layer: str | None = None
    equation: EquationDifference | None = None
    equation_words: str | None = None
    """The equation in a line of text; None where the difference is not in the step's program."""
    replica: int | None = None


def explain_difference(
    runner: ScriptRunner, one: FinishedRun, other: FinishedRun, difference: RecordDifference, process: int, say: Say
) -> Difference:
    """Return the difference with its cause, layer and line. `process` is the process of the other run that differs first."""
    processes = sorted(range(other.plan.processes), key=lambda number: number != process)
    return describe_difference(one, other, difference, *trace_difference(runner, one, other, difference, processes, say))


def explain_failure(runner: ScriptRunner, one: FinishedRun, other: FinishedRun, say: Say) -> Difference:
    """Return the difference between a run that succeeded and one that failed."""
    difference = RecordDifference(len(other.steps), EXIT)
    processes = list(range(other.plan.processes))
    explained = describe_difference(one, other, difference, *trace_difference(runner, one, other, difference, processes, say))
    last = (find_last_lines(other.output).splitlines() or ["it wrote nothing"])[-1]
    said = f"{other.plan.name!r} ended with exit code {other.exit_code}: {last.removesuffix('.')}."
    if explained.cause is Cause.UNKNOWN:
        return dataclasses.replace(explained, cause_words=said, what_to_write=FAILED, source=None)
    return dataclasses.replace(explained, cause_words=f"{said} {explained.cause_words}")


def trace_difference(
    runner: ScriptRunner, one: FinishedRun, other: FinishedRun, difference: RecordDifference, processes: Sequence[int], say: Say
) -> tuple[TracedDifference, ProcessTrace | None]:
    """Repeat two runs with their lines noted, and follow the difference in the first process of the other run that shows a cause.

    A gradient has the same bits in all processes, and the cause may be in a process that differs no sooner than the others.

    Returns:
        (the difference as far as it was followed, a trace of either run).
    """
    repeated = repeat_traced(runner, one, other, say)
    ours = read_traced(runner, one, 0)
    theirs = [read_traced(runner, other, process) for process in processes]
    either = next((trace for trace in (ours, *theirs) if trace is not None), None)
    followed = [follow_difference(ours, trace, difference) for trace in theirs if ours is not None and trace is not None]
    causes = [traced for traced in followed if traced.origin is not None and traced.origin.cause is not None]
    if ours is not None and not causes and difference.kind != EXIT and has_bits_of_other(one, other, repeated):
        followed = [TracedDifference(find_file_origin(ours), replica=traced.replica) for traced in followed]
    return next(iter(causes + followed), TracedDifference()), either


def follow_difference(one: ProcessTrace, other: ProcessTrace, difference: RecordDifference) -> TracedDifference:
    """Follow a difference back to the line that it comes from."""
    comparison = TraceComparison(one, other)
    layers = one.content["layers"]
    if difference.kind in (ROWS, EXIT):
        origin = find_first_origin(comparison, list_row_places(comparison, difference.step))
        if origin is not None and origin.cause is Cause.PROCESS:
            origin = dataclasses.replace(origin, cause=Cause.PROCESS_ROWS)
        if origin is None or origin.cause is None:
            origin = find_first_origin(comparison, list_branches(comparison)) or origin
        return TracedDifference(origin, replica=find_replica(one, other, difference.step))
    if difference.kind == ENTRY:
        path = difference.variables[0]
        places = [place for trace in (one, other) for place in trace.list_variable_places(path, difference.step)]
        return TracedDifference(find_first_origin(comparison, places), find_layer_of_variable(path, layers))
    equation = find_equation(one, other, difference.step)
    if equation is not None:
        origin = find_origin(comparison, equation.place) if equation.place else None
        layer = read_layer(equation.equation["scopes"], layers)
        return TracedDifference(origin, layer, equation, format_equations(equation))
    for called in list_callback_equations(one):
        for file, line, _ in called["callbacks"]:
            origin = find_in_callback(file, line, comparison.sets)
            if origin is not None:
                return TracedDifference(origin, read_layer(called["scopes"], layers), None, format_equation(called))
    return TracedDifference(find_first_origin(comparison, one.list_call_places(difference.step)))


def find_replica(one: ProcessTrace, other: ProcessTrace, step: int) -> int | None:
    """Return the first replica whose rows differ in a step; None where that is not known."""
    ones = one.content["rows"]
    others = other.content["rows"]
    if step >= min(len(ones), len(others)):
        return None
    pairs = enumerate(zip(ones[step], others[step], strict=False))
    return next((replica for replica, (mine, its) in pairs if mine != its), None)


def list_row_places(comparison: TraceComparison, step: int) -> Iterator[Place]:
    """Yield the lines from which rows came: those that called the step, and functions that gave values to a library."""
    yield from comparison.one.list_call_places(step)
    for place in comparison.list_differing_places():
        if HANDED in comparison.list_differing_names(place):
            yield place


def find_first_origin(comparison: TraceComparison, places: Iterator[Place] | list[Place]) -> Origin | None:
    """Return the first origin with a cause among those of some lines; else the first one."""
    origins: list[Origin] = []
    for place in places:
        origin = find_origin(comparison, place)
        if origin.cause is not None:
            return origin
        origins.append(origin)
    return origins[0] if origins else None


def format_equations(difference: EquationDifference) -> str:
    """Return the equations of both programs as one line."""
    mine = format_equation(difference.equation)
    its = format_equation(difference.other)
    return mine if mine == its else f"{mine}; in the other run {its}"


def describe_difference(
    one: FinishedRun, other: FinishedRun, difference: RecordDifference, traced: TracedDifference, trace: ProcessTrace | None
) -> Difference:
    """Return the difference in the words of a report."""
    cause = choose_cause(difference, traced)
    words = WORDS[cause]
    if cause is Cause.UNKNOWN and one.plan.devices is None and other.plan.devices is None:
        cause, words = explain_without_line(one, other, difference)
    layer = traced.layer
    if layer is None and trace is not None and difference.kind == ENTRY:
        layer = find_layer_of_variable(difference.variables[0], trace.content["layers"])
    said = words.cause
    if traced.origin is not None and traced.origin.outside is not None:
        outside = quote_line(traced.origin.outside)
        said = f"{said} It comes from line {outside.line}: {outside.text}"
    return Difference(
        runs=(one.plan.name, other.plan.name),
        step=difference.step + (difference.kind != ENTRY or difference.step > 0),
        kind=difference.kind,
        variable=next(iter(difference.variables), None),
        layer=layer,
        replica=traced.replica,
        equation=traced.equation_words,
        source=quote_line(traced.origin.place) if traced.origin else None,
        cause=cause,
        cause_words=said,
        what_to_write=words.instead,
        differing=difference.variables,
    )


def explain_without_line(one: FinishedRun, other: FinishedRun, difference: RecordDifference) -> tuple[Cause, CauseWords]:
    """Return the cause and the words where no line tells: the facts of two runs, or a start without a seed."""
    if not other.steps:  # it failed before
        return Cause.UNKNOWN, WORDS[Cause.UNKNOWN]
    if one.exit_code is None:
        facts = list_fact_differences(one.steps[0].program.facts, other.steps[0].program.facts)
        if facts:
            return Cause.VERSIONS, CauseWords(f"{WORDS[Cause.VERSIONS].cause} {'; '.join(facts)}.", WORDS[Cause.VERSIONS].instead)
        return Cause.UNKNOWN, OTHER_SCRIPT
    if difference.step == 0 and one.steps[0].entry != other.steps[0].entry:
        return Cause.HOST_RANDOM, NO_SEED
    return Cause.UNKNOWN, WORDS[Cause.UNKNOWN]


def list_fact_differences(ones: Json, others: Json, name: str = "") -> list[str]:
    """Return what differs between the facts of two runs, in words."""
    if isinstance(ones, dict) and isinstance(others, dict):
        keys = [key for key in ones if key in others]
        return [words for key in keys for words in list_fact_differences(ones[key], others[key], f"{name}.{key}".strip("."))]
    return [] if ones == others else [f"{name} is {ones!r} there and {others!r} here"]


def choose_cause(difference: RecordDifference, traced: TracedDifference) -> Cause:
    """Return the cause of a line, as what differs makes it more exact."""
    cause = traced.origin.cause if traced.origin else None
    has_other_shapes = difference.has_other_shapes or (traced.equation is not None and traced.equation.has_other_shapes)
    if cause is Cause.DEVICES and has_other_shapes:
        return Cause.SHAPE
    if cause is Cause.HOST_RANDOM and traced.equation_words is not None:
        return Cause.STEP_RANDOM
    return cause or Cause.UNKNOWN
