"""The report of an audit for a terminal: a table of the runs, the finding, and what to write instead."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from unisono._src.audit.audit_report import AuditedRun, AuditReport, Difference, ReplicaComparison
from unisono._src.audit.difference_kinds import KIND_WORDS

WIDTH = 100


def format_report(report: AuditReport) -> str:
    """Return the report as text."""
    return "\n".join(iterate_lines(report))


def iterate_lines(report: AuditReport) -> Iterator[str]:
    yield from format_table(report.runs)
    yield ""
    if report.difference is None:
        steps = min(run.steps for run in report.runs)
        yield f"Equal: {len(report.runs)} runs with R = {report.replicas} have the same bits in their first {steps} steps."
    else:
        yield from format_difference(report.difference)
    if report.comparison is not None:
        yield ""
        yield from format_comparison(report.comparison)
    for warning in report.warnings:
        yield ""
        yield from wrap_text(f"A run warned: {warning}")


def format_table(runs: Sequence[AuditedRun]) -> Iterator[str]:
    """Return a line for each run."""
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
    yield from wrap_text(f"Not equal: {first!r} and {second!r} part {when}, in {KIND_WORDS[difference.kind]}.")
    for name, value in (
        ("layer", difference.layer),
        ("variable", format_variables(difference)),
        ("replica", difference.replica),
        ("equation", difference.equation),
    ):
        if value is not None:
            yield f"    {name + ':':10}{value}"
    if difference.source is not None:
        yield f"    {'line:':10}{difference.source.file}:{difference.source.line}"
        yield f"    {'':10}    {difference.source.text}"
    yield ""
    probably = "Cause" if difference.is_certain else "Probable cause"
    yield from wrap_text(f"{probably}: {difference.cause_words}")
    yield from wrap_text(f"Instead: {difference.what_to_write}")


def format_comparison(comparison: ReplicaComparison) -> Iterator[str]:
    """Yield how R = 1 and R = n differ, and what makes R matter."""
    near = "near each other" if comparison.is_near else "not near each other"
    yield from wrap_text(
        f"R = 1 and R = {comparison.replicas}: the weights are {near}. Their distance, relative to their size, is {comparison.distance:.2g}, and "
        f"rounding in another order makes {comparison.tolerance:g} at most."
    )
    for coupling in comparison.couplings:
        yield f"    {coupling.layer or 'the loss or the step'}: {coupling.cause}"
        if coupling.source is not None:
            yield f"        {coupling.source.file}:{coupling.source.line}    {coupling.source.text}"
        yield from (f"        {line}" for line in wrap_text(f"{coupling.why} Instead: {coupling.what_to_write}"))
    for rows in comparison.rows:
        if rows.duplicates or rows.missing:
            yield f"    replica {rows.replica}: {rows.rows} rows, {rows.duplicates} of them twice, {rows.missing} missing"


def format_variables(difference: Difference) -> str | None:
    if difference.variable is None:
        return None
    others = len(difference.differing) - 1
    return difference.variable + (f", and {others} more" if others > 0 else "")


def wrap_text(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
