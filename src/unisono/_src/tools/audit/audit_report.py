"""The report of an audit. It says what was run, and where two runs part. Its JSON is what `--json` writes."""

from __future__ import annotations

import dataclasses
import enum
import math
import textwrap
from collections.abc import Iterator, Sequence

from unisono._src.tools.records import KIND_WORDS
from unisono._src.typing import Json, UserObject

FORMAT = 1
EXIT = "exit"
WORDS_OF_KINDS = {**KIND_WORDS, EXIT: "the exit code"}


class Cause(enum.StrEnum):
    """Why two runs part. The values stand in the JSON of reports."""

    EACH_RUN = "each run"
    """Runs on the same placement differ: numbers without a seed, a clock, the order of threads."""
    HASH_ORDER = "hash order"
    """Runs differ by the seed of `hash()`, and with it by the order of sets."""
    EARLIER_RUN = "earlier run"
    """The first run differs from all later ones: it has left something that they read."""
    DEVICES = "devices"
    """Runs differ by the count of devices."""
    PROCESS = "process"
    """Runs differ by the number of processes, or in one of them."""
    VERSIONS = "versions"
    """The runs had other versions, another kind of device, or other kernels."""
    SCRIPT = "script"
    """The recorded run was of another script, other arguments, or other data."""


@dataclasses.dataclass(frozen=True)
class AuditedRun:
    """A run of the script on one placement."""

    name: str
    """What tables call the run: "1 device", "2 processes", "1 device, again"."""
    devices: int | None
    """Devices of each process. None if the run ended before its first step."""
    processes: int
    steps: int
    exit_code: int | None
    """None for a recorded run that was not started here."""
    losses: tuple[float | None, ...]
    """The loss of each step. None if a step does not report it."""
    digest: str | None
    """A digest over all that is recorded of the last step; None without steps."""
    seconds: float
    end_of_output: str = ""
    """The last lines that a failed run wrote; empty where the run succeeded."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A line of the user's."""

    file: str
    line: int
    text: str
    """The line, without the space around it."""
    function: str = ""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where two runs part, in a step's inputs or program. It is as exact as the records of both allow."""

    layer: str | None = None
    """The layer, by the names from the model down, with "/" between them."""
    array: str | None = None
    """The array of the batch whose rows differ first, as it is taken out of the batch: "[0]['image']"."""
    row: int | None = None
    """The first row of the global batch that differs."""
    replica: int | None = None
    """The replica of this row."""
    equation: str | None = None
    """The first equation of the step's program that differs, or that calls Python back, as JAX prints it."""
    source: Source | None = None
    """The line that JAX knows for the equation, or for the nearest one before it."""
    values: tuple[str, str] | None = None
    """What either run has there: the first values of the row or of the variable, or the constants of the equation."""


@dataclasses.dataclass(frozen=True)
class Difference(Place):
    """The first difference between two runs, and its cause."""

    _: dataclasses.KW_ONLY
    runs: tuple[str, str]
    """The names of the runs that part."""
    step: int
    """The number of the step, from 1 on. 0 if the runs part before any step."""
    kind: str
    """What differs: one of `WORDS_OF_KINDS`."""
    variable: str | None
    """The path of the first variable that differs."""
    cause: Cause
    cause_words: str
    """The cause in a sentence or two."""
    what_to_write: str
    """What to write instead."""
    differing: tuple[str, ...] = ()
    """The paths of all variables that differ in this step, in this kind."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """How much of each layer differs between two runs, by step. It is the fraction of the layer's digests that differ."""

    runs: tuple[str, str]
    layers: tuple[str, ...]
    steps: tuple[int, ...]
    fractions: tuple[tuple[float, ...], ...]
    """(layer, step)"""


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The result of an audit. It has the runs, and where two of them part."""

    script: str
    command: tuple[str, ...]
    versions: dict[str, str]
    replicas: int | None
    """R, the same in all runs. None if no run has trained."""
    runs: tuple[AuditedRun, ...]
    difference: Difference | None
    divergence: tuple[Divergence, ...]
    warnings: tuple[str, ...]
    format: int = FORMAT

    @property
    def equal(self) -> bool:
        return self.difference is None

    def to_json(self) -> dict[str, Json]:
        """Convert the report to numbers, strings, lists and dicts."""
        return convert_to_json({**dataclasses.asdict(self), "equal": self.equal})


def convert_to_json(value: UserObject) -> Json:
    if isinstance(value, dict):
        return {str(key): convert_to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_json(item) for item in value]
    return name_number(value) if isinstance(value, float) else value


def name_number(number: float) -> float | str:
    """Convert a number for JSON. If it is not finite, its name is given."""
    return number if math.isfinite(number) else str(number)


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
