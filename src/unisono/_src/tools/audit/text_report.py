"""The report of an audit for a terminal. It has a table of the runs, the finding, and what to write instead."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from unisono._src.tools.audit.audit_report import WORDS_OF_KINDS, AuditedRun, AuditReport, Difference

WIDTH = 100


def format_report(report: AuditReport) -> str:
    """Format the report as text."""
    return "\n".join(iterate_lines(report))


def iterate_lines(report: AuditReport) -> Iterator[str]:
    yield from format_table(report.runs)
    yield ""
    if report.difference is None:
        steps = min(run.steps for run in report.runs)
        yield f"Equal: {len(report.runs)} runs with R = {report.replicas} have the same bits in their first {steps} steps."
    else:
        yield from format_difference(report.difference)
    for warning in report.warnings:
        yield ""
        yield from wrap_text(f"A run warned: {warning}")


def format_table(runs: Sequence[AuditedRun]) -> Iterator[str]:
    """Format a line for each run."""
    return format_columns([("run", "devices", "processes", "steps", "last loss", "digest", "seconds"), *map(list_cells, runs)])


def format_columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield a line for each row, with cells below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def list_cells(run: AuditedRun) -> tuple[str, ...]:
    loss = run.losses[-1] if run.losses else None
    return (
        run.name,
        "-" if run.devices is None else str(run.devices),
        str(run.processes),
        str(run.steps) if not run.exit_code else f"{run.steps}, then exit code {run.exit_code}",
        "-" if loss is None else f"{loss:.6g}",
        run.digest or "-",
        "-" if run.exit_code is None else f"{run.seconds:.1f}",
    )


def format_difference(difference: Difference) -> Iterator[str]:
    """Yield what differs, where, and why."""
    first, second = difference.runs
    when = f"in step {difference.step}" if difference.step else "before the first step"
    yield from wrap_text(f"Not equal: {first!r} and {second!r} part {when}, in {WORDS_OF_KINDS[difference.kind]}.")
    for name, value in list_facts(difference):
        yield f"    {name + ':':10}{value}"
    if difference.source is not None:
        yield f"    {'line:':10}{difference.source.file}:{difference.source.line}"
        yield f"    {'':10}    {difference.source.text}"
    yield ""
    yield from wrap_text(f"Cause: {difference.cause_words}")
    yield from wrap_text(f"Instead: {difference.what_to_write}")


def list_facts(difference: Difference) -> list[tuple[str, str]]:
    """List what is known of a difference's place. Each item is (name, value)."""
    others = len(difference.differing) - 1
    more = f", and {others} more" if others > 0 else ""
    row = None if difference.row is None else f"{difference.row} of the global batch"
    facts = (
        ("layer", difference.layer),
        ("variable", difference.variable and difference.variable + more),
        ("array", difference.array),
        ("row", row),
        ("replica", difference.replica),
        ("equation", difference.equation),
        ("values", difference.values and "; in the other run ".join(difference.values)),
    )
    return [(name, str(value)) for name, value in facts if value is not None]


def wrap_text(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
