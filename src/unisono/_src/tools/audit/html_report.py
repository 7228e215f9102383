"""The report of an audit as one HTML page.

It opens without a network, and shows the verdict, the finding, plots, and what was run. The page is `templates/report.html`. What
is prepared here are the words and numbers that it takes from the report. Whatever it quotes is escaped.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2

from unisono._src.tools.audit.audit_report import EXIT, WORDS_OF_KINDS, AuditedRun, AuditReport, Divergence, Source
from unisono._src.tools.records import STEPS
from unisono._src.typing import Keywords, UserObject

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Browsers load nothing for the page and run no code in it, whatever stands in a name."""

AROUND = 4
"""Lines shown before the line that is meant, and after it."""

MOST_LAYERS = 60
LONGEST_LINE = 400

UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Characters that change how the text around them is read, or that no file in UTF-8 can hold."""


class Curve(NamedTuple):
    """The losses of a run, as the page draws them."""

    name: str
    words: str
    path: str
    is_parted: bool
    width: float
    not_finite: float | None
    """The position of its first loss that is not finite. None if all are finite."""


class Strip(NamedTuple):
    """The steps of a layer, as the page draws them."""

    layer: str
    cells: list[tuple[float, float, float]]
    words: str


def render_report(report: AuditReport) -> str:
    """Render the page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("unisono._src.tools.audit"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=show_unseen,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(prepare_page(report))


def prepare_page(report: AuditReport) -> Keywords:
    """Prepare the values that the template needs."""
    difference = report.difference
    tone, headline, sentence = decide_verdict(report)
    parted = [pair for pair in report.divergence if any(map(any, pair.fractions))]
    parted.sort(key=lambda pair: difference is None or pair.runs != difference.runs)  # the pair of the finding comes first
    losses = [run for run in report.runs if run.losses]
    steps = max((len(run.losses) for run in losses), default=0)
    axis = make_axis([loss for run in losses for loss in run.losses])
    return {
        "report": report,
        "policy": POLICY,
        "tone": tone,
        "headline": headline,
        "sentence": sentence,
        "facts": [report.script, f"R = {report.replicas}", count(report.runs, "run"), count(range(steps), "step")],
        "kind_words": WORDS_OF_KINDS[difference.kind] if difference else "",
        "lines": list_lines(difference.source) if difference and difference.source else [],
        "axis": axis,
        "curves": [draw_losses(run, losses, axis, steps) for run in losses],
        "step_labels": label_steps(range(1, steps + 1)),
        "first_step": locate_step(difference.step, steps) if difference and 0 < difference.step <= steps else None,
        "pairs": [(pair.runs, draw_strips(pair), label_steps(pair.steps)) for pair in parted],
        "same_pairs": [" and ".join(pair.runs) for pair in report.divergence if pair not in parted],
        "command": shlex.join(report.command),
    }


def decide_verdict(report: AuditReport) -> tuple[str, str, str]:
    """Choose (the color of the page, the headline, the sentence below)."""
    difference = report.difference
    if difference is None:
        compared = f"{count(report.runs, 'run')} of {count(range(max(run.steps for run in report.runs)), 'step')}"
        said = f"{compared}: rows, gradients, weights and optimizer state are the same, bit by bit."
        return "same", "Same bits on all placements", said
    headline = f"The runs part at step {difference.step}" if difference.step else "The runs part before the first step"
    headline = {EXIT: "A run failed", STEPS: "The runs have different numbers of steps"}.get(difference.kind, headline)
    return "parted", headline, difference.cause_words


def list_lines(source: Source) -> list[tuple[int, str]]:
    """List a source line and its neighbours, with numbers. It is the line alone if its file is gone or has changed."""
    lines: list[str] = []
    with contextlib.suppress(OSError, ValueError):  # it is gone, or has a name that no file can have
        lines = Path(source.file).read_text(errors="replace").splitlines()
    if not (0 < source.line <= len(lines) and lines[source.line - 1].strip() == source.text.strip()):
        return [(source.line, source.text)]
    first = max(1, source.line - AROUND)
    shown = [line.expandtabs(4) for line in lines[first - 1 : source.line + AROUND]]
    indent = min((len(line) - len(line.lstrip()) for line in shown if line.strip()), default=0)
    return list(enumerate((line[indent:][:LONGEST_LINE] for line in shown), first))


def draw_losses(run: AuditedRun, runs: Sequence[AuditedRun], axis: Axis, steps: int) -> Curve:
    """Draw the curve of a run. Of curves that coincide each is thinner than the one before, and seen inside of it."""
    is_parted = repr(run.losses) != repr(runs[0].losses)  # NaN is as NaN
    alike = [other for other in runs if (repr(other.losses) != repr(runs[0].losses)) == is_parted]
    after = len(alike) - 1 - alike.index(run)
    width = 2 + (2.5 if is_parted else 4) * min(after, 5) + 3 * (len(alike) < len(runs) and not is_parted)
    unfit = [step for step, loss in enumerate(run.losses, 1) if loss is not None and not is_drawable(loss)]
    cross = locate_step(unfit[0], steps) if unfit else None
    words = describe_losses(run, runs[0], unfit)
    return Curve(run.name, words, draw_curve(run.losses, axis, steps), is_parted, width, cross)


def describe_losses(run: AuditedRun, first: AuditedRun, unfit: Sequence[int]) -> str:
    """Compare in words a run's losses with the first run's. The text also says where losses are missing or not finite."""
    pairs = list(zip(first.losses, run.losses, strict=False))
    parted = next((step for step, pair in enumerate(pairs, 1) if repr(pair[0]) != repr(pair[1])), None)
    if run is first:
        words = [f"{run.losses[-1]:.9g} after the last step" if run.losses[-1] is not None else "no loss after the last step"]
    elif parted is not None:
        words = [f"another loss than {first.name} from step {parted} on"]
    elif len(run.losses) != len(first.losses):
        words = [f"the losses of {first.name}, with {count(run.losses, 'step')} in place of {len(first.losses)}"]
    else:
        words = [f"at every step the loss of {first.name}"]
    if None in run.losses:
        words.append(f"no loss is told at {run.losses.count(None)} of {len(run.losses)} steps")
    if unfit:
        words.append(f"NaN or infinite at {count(unfit, 'step')}, the first one is step {unfit[0]}")
    return "; ".join(words)


def draw_strips(pair: Divergence) -> list[Strip]:
    """Draw a strip for each layer. If there are too many, the layers that differ in the earliest steps are drawn."""
    firsts = [next((at for at, part in enumerate(parts) if part > 0), None) for parts in pair.fractions]
    order = sorted(range(len(firsts)), key=lambda at: math.inf if firsts[at] is None else firsts[at] or 0)
    strips: list[Strip] = []
    for at in sorted(order[:MOST_LAYERS]):
        first = firsts[at]
        words = "the same" if first is None else f"step {pair.steps[first]}"
        strips.append(Strip(pair.layers[at], draw_strip(pair.fractions[at]), words))
    return strips


def count(things: Sequence[UserObject], noun: str) -> str:
    """Format a number with its noun."""
    return f"{len(things):,} {noun}{'s' * (len(things) != 1)}"


def show_unseen(value: UserObject) -> UserObject:
    """Escape unseen characters in a text, as Python writes them. So a name cannot look like another one."""
    if not isinstance(value, str) or hasattr(value, "__html__"):  # a part of the page that is escaped
        return value
    return UNSEEN.sub(lambda match: match[0].encode("unicode_escape", "backslashreplace").decode(), value)


SIZE = 1000
"""Of a plot's own coordinates, which are stretched to the size that the page gives."""

LARGEST = 1e300
"""Numbers beyond it are not drawn: differences of two of them may overflow."""

LEAST_ROOM = 1e-300
"""What is nearer to 0 is 0 on an axis: ticks between such numbers may not be numbers of their own."""

MOST_TICKS = 5
MOST_COLUMNS = 240
MOST_LABELS = 8


class Axis(NamedTuple):
    """An axis, from its lower to its upper end."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def locate(self, number: float) -> float:
        """Compute the height of a number in a drawing. It is 0 at the upper end of the axis and 1 at the lower."""
        return (self.high - number) / (self.high - self.low)

    @property
    def labels(self) -> list[tuple[float, str]]:
        """The ticks with their texts. The texts have as many digits as tell the ticks apart."""
        largest = max(map(abs, self.ticks)) or 1.0
        apart = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else largest
        digits = 1 + math.ceil(max(0.0, math.log10(largest / apart)) + 1e-9)
        return [(self.locate(tick), f"{tick:.{digits}g}") for tick in self.ticks]


def is_drawable(number: float | None) -> bool:
    """Whether a number has a position on an axis."""
    return number is not None and math.isfinite(number) and abs(number) < LARGEST


def make_axis(numbers: Sequence[float | None]) -> Axis:
    """Make an axis for the drawable numbers, with some room around."""
    drawable = [number for number in numbers if number is not None and is_drawable(number)] or [0.0, 1.0]
    low, high = min(drawable), max(drawable)
    # Numbers that differ in their last digits alone have room for ticks that are numbers of their own.
    room = max(0.06 * (high - low), 1e-9 * max(abs(low), abs(high))) if low < high else 0.1 * abs(high)
    room = room if room > LEAST_ROOM else 1.0
    return Axis(low - room, high + room, choose_ticks(low - room, high + room))


def choose_ticks(low: float, high: float) -> tuple[float, ...]:
    """Choose some round numbers between two numbers."""
    rough = (high - low) / MOST_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * size for factor in (1.0, 2.0, 5.0) if factor * size >= rough), 10 * size)
    return tuple(index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1))


def draw_curve(losses: Sequence[float | None], axis: Axis, steps: int) -> str:
    """Draw the path of a curve. A loss between two gaps is a dot, which round ends make of a line without a length."""
    commands: list[str] = []
    is_open = False
    for step, loss in enumerate(losses, 1):
        if loss is None or not is_drawable(loss):
            is_open = False
            continue
        point = f"{SIZE * locate_step(step, steps):.4g} {SIZE * axis.locate(loss):.4g}"
        commands.append(f"L{point}" if is_open else f"M{point}h0")
        is_open = True
    return "".join(commands)


def locate_step(step: int, steps: int) -> float:
    """Compute the position of a step's middle along the axis. The left end is 0, the right end is 1."""
    return (step - 0.5) / steps


def label_steps(steps: Sequence[int]) -> list[tuple[float, int]]:
    """List (position, number) of the steps named below a plot. These are the first one, and others at the same distance."""
    distance = max(1, math.ceil(len(steps) / MOST_LABELS))
    return [(locate_step(at + 1, len(steps)), steps[at]) for at in range(0, len(steps), distance)]


def draw_strip(fractions: Sequence[float]) -> list[tuple[float, float, float]]:
    """List (left end, width, opacity) of a layer's cells that differ. Positions are between 0 and 1. Many steps share a cell."""
    length = max(1, math.ceil(len(fractions) / MOST_COLUMNS))
    cells = [max(fractions[start : start + length]) for start in range(0, len(fractions), length)]
    width = length / len(fractions) if fractions else 1.0
    return [(at * width, width, 0.25 + 0.75 * fraction) for at, fraction in enumerate(cells) if fraction > 0]
