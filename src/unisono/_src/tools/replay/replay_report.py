"""The report of a replay, for a terminal and in JSON."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator

from unisono._src.tools.audit.audit_report import format_columns, wrap_text
from unisono._src.tools.records import KIND_WORDS, RecordDifference
from unisono._src.typing import Json

MOST_LAYERS = 40
"""The number of layers in the table; the JSON has all."""


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """The report of a replay."""

    step: int
    """The step that was replayed, counted from 0."""
    first: int
    """The step at which the replay began: 0, or a checkpoint's."""
    replicas: int
    difference: RecordDifference | None
    """The first difference from the recorded run. None if all bits are the same."""
    facts: tuple[str, ...]
    """If the bits differ: the facts that are not the recorded run's."""
    seen: Json
    """What the inspector saw of the step."""

    @property
    def equal(self) -> bool:
        return self.difference is None

    def to_json(self) -> Json:
        difference = self.difference
        return {
            "step": self.step + 1,
            "replayed_from": self.first + 1,
            "R": self.replicas,
            "equal": self.equal,
            "difference": difference
            and {"step": difference.step + 1, "kind": difference.kind, "variables": list(difference.variables)},
            "other_facts": list(self.facts),
            **self.seen,
        }


def format_replay(report: ReplayReport) -> str:
    """Format the report as text."""
    return "\n".join(
        [*format_equality(report), "", *format_replicas(report), *format_layers(report), "", *format_not_finite(report)]
    )


def format_equality(report: ReplayReport) -> Iterator[str]:
    steps = report.step - report.first + 1
    start = "the beginning" if report.first == 0 else f"the checkpoint after step {report.first}"
    if report.difference is None:
        many = f"step {report.step + 1} has" if steps == 1 else f"steps {report.first + 1} to {report.step + 1} have"
        yield from wrap_text(f"Equal: from {start} on, {many} the bits of the recorded run.")
        return
    difference = report.difference
    yield from wrap_text(
        f"Not equal: replayed from {start}, step {difference.step + 1} differs from the recorded run in {KIND_WORDS[difference.kind]}"
        f"{': ' + difference.variables[0] if difference.variables else ''}. What follows is of the replay, and not of the recorded run."
    )
    for fact in report.facts:
        yield from wrap_text(f"Here {fact}.")
    if not report.facts:
        yield from wrap_text("Run `unisono audit` on the script: it finds where runs differ, and why.")


def format_replicas(report: ReplayReport) -> Iterator[str]:
    """Yield a line for each replica. It has the rows, the part of the loss and the norm of the gradient."""
    replicas: list[Json] = report.seen["replicas"]
    yield f"Step {report.step + 1} by replica, of R = {report.replicas}:"
    yield ""
    rows = [("replica", "rows", "part of the loss", "norm of the gradient")]
    for replica in replicas:
        first, end = replica["rows"]
        norms = [float(norm) for norm in replica["gradient_norms"].values()]
        norm = format_number(math.hypot(*norms)) if norms else "-"
        rows.append((str(replica["replica"]), f"{first} to {end - 1}", format_number(replica["loss"]), norm))
    yield from indent_lines(format_columns(rows))
    losses = [float(replica["loss"]) for replica in replicas if replica["loss"] is not None]
    if len(losses) == len(replicas) and not math.isnan(sum(losses)):
        yield ""
        yield f"The parts add up to a loss of {format_number(sum(losses))}."


def format_layers(report: ReplayReport) -> Iterator[str]:
    """Yield a line for each layer: its gradient norms by replica."""
    replicas: list[Json] = report.seen["replicas"]
    by_layer = [join_layers(replica["gradient_norms"]) for replica in replicas]
    if not any(by_layer):
        return
    shown = replicas if len(replicas) <= 8 else replicas[:4] + replicas[-4:]
    yield ""
    yield "Norms of gradients by layer and replica:"
    yield ""
    rows = [("layer", *(str(replica["replica"]) for replica in shown))]
    layers = list(by_layer[0])
    for layer in layers[:MOST_LAYERS]:
        rows.append((layer, *(format_number(by_layer[replicas.index(replica)][layer]) for replica in shown)))
    yield from indent_lines(format_columns(rows))
    if len(layers) > MOST_LAYERS:
        yield f"... and {len(layers) - MOST_LAYERS} layers more; --json has them."


def join_layers(norms: dict[str, float | str]) -> dict[str, float]:
    """Join the gradient norms of variables to norms of layers."""
    grouped: dict[str, list[float]] = defaultdict(list)
    for path, norm in norms.items():
        grouped[path.rpartition("/")[0] or path].append(float(norm))
    return {layer: math.hypot(*parts) for layer, parts in grouped.items()}


def format_not_finite(report: ReplayReport) -> Iterator[str]:
    """Yield the first value that is not finite. If it is an infinity that becomes a NaN, the NaN follows."""
    origins: list[Json] = report.seen["not_finite"]
    if not origins:
        yield "All losses and gradients of the step are finite."
    for place, origin in enumerate(origins):
        yield f"{'It becomes the first' if place else 'The first'} {origin['kind']}:"
        source = origin["source"]
        facts = {
            "replica": origin["replica"],
            "row": format_row(origin),
            "where": origin["where"],
            "layer": origin["layer"],
            "equation": origin["equation"],
            "line": source and f"{source[0]}:{source[1]}    {source[2]}",
        }
        yield from (f"    {name:9} {value}" for name, value in facts.items() if value is not None)


def format_row(origin: Json) -> str | None:
    if origin["row"] is None:
        return None
    of_data = "" if origin["row_of_data"] is None else f", row {origin['row_of_data']} of the data"
    return f"{origin['row']} of the global batch{of_data}"


def format_number(number: float | str | None) -> str:
    return "-" if number is None else f"{float(number):.6g}"


def indent_lines(lines: Iterator[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)
