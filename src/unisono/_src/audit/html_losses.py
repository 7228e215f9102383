"""The plot of losses: the runs on top of each other. Curves that coincide are seen as stripes of one ribbon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from unisono._src.audit.html_curves import Curve, compare_curves, describe_curve, has_same_losses
from unisono._src.audit.html_elements import Markup, make_element
from unisono._src.audit.html_numbers import Axis, choose_steps, is_drawable, make_axis

MOST_POINTS = 400
"""Of a curve. Where there are more steps, several of them share a place, at which the smallest and the largest loss are drawn."""

SIZE = 1000
"""Of the plot's own coordinates, which are stretched to the size that the page gives."""

CROSS = "\N{MULTIPLICATION SIGN}"
"""At the first loss of a run that is not finite."""

DASHES = ("7 4", "2 3", "12 3 2 3", "1 5")
"""Of curves that part from the first one."""


class Stroke(NamedTuple):
    """The look of a curve."""

    is_parted: bool
    width: float
    percent: int
    """How much of its colour is in it; the rest is that of the paper."""
    dashes: str | None


def draw_losses(curves: Sequence[Curve], first: int | None) -> Markup:
    """Return the figure of the losses; `first` is the step where runs part."""
    strokes = choose_strokes(curves)
    words = [describe_curve(curve) if curve is curves[0] else compare_curves(curves[0], curve) for curve in curves]
    steps = max(len(curve.losses) for curve in curves)
    axis = make_axis([loss for curve in curves for loss in curve.losses if loss is not None and is_drawable(loss)])
    drawn = sorted(zip(curves, strokes, strict=True), key=lambda pair: pair[1].is_parted)  # those that part lie on top
    lines = [draw_curve(curve, stroke, axis, steps) for curve, stroke in drawn]
    heights = [f"{100 * (1 - axis.place(tick)):.2f}%" for tick in axis.ticks]
    grid = [draw_line(x=("0", "100%"), y=(height, height), name="grid") for height in heights]
    picture = make_element(
        "svg",
        make_element("title", "Losses of all runs by step"),
        make_element("desc", "; ".join(f"{curve.name}: {comparison}" for curve, comparison in zip(curves, words, strict=True))),
        grid,
        draw_first_step(first, steps),
        make_element(
            "svg",
            lines,
            viewBox=f"0 0 {SIZE} {SIZE}",
            preserveAspectRatio="none",
            width="100%",
            height="100%",
            overflow="visible",
        ),
        [draw_not_finite(curve, steps, stroke) for curve, stroke in zip(curves, strokes, strict=True)],
        role="img",
        class_="area",
    )
    legend = make_element("ul", [draw_legend(*entry) for entry in zip(curves, strokes, words, strict=True)], class_="legend")
    scale = "Loss, on a logarithmic scale" if axis.is_logarithmic else "Loss"
    return make_element(
        "figure",
        make_element("p", scale, ", by step", class_="axis-name"),
        make_element("div", draw_labels(axis), picture, draw_step_labels(range(1, steps + 1)), class_="plot"),
        legend,
    )


def choose_strokes(curves: Sequence[Curve]) -> list[Stroke]:
    """Return a stroke for each curve: in one colour those equal to the first one, in another colour those that are not.

    The strokes of a colour become thinner and darker, so that each is seen inside of the one before where they coincide.
    """
    parted = [not has_same_losses(curves[0], curve) for curve in curves]
    strokes: list[Stroke] = []
    for index, is_parted in enumerate(parted):
        before = parted[:index].count(is_parted)
        after = parted[index + 1 :].count(is_parted)
        percent = round(100 * (0.2 + 0.8 * ((before + 1) / (before + 1 + after)) ** 1.5)) if after else 100
        width = 2 + (2.5 if is_parted else 4) * min(after, 5)
        if any(parted) and not is_parted:
            width += 3  # so that a curve that parts later is seen to lie on it until then
        strokes.append(Stroke(is_parted, width, percent, DASHES[(before - 1) % len(DASHES)] if is_parted and before else None))
    return strokes


def draw_curve(curve: Curve, stroke: Stroke, axis: Axis, steps: int) -> Markup:
    """Return the line of a curve. A loss between two gaps is a dot, which round ends make of a line without a length."""
    commands: list[str] = []
    is_open = False
    for step, loss in thin_out(curve.losses):
        if loss is None or not is_drawable(loss):
            is_open = False
            continue
        point = f"{SIZE * locate_step(step, steps):.4g} {SIZE * (1 - axis.place(loss)):.4g}"
        commands.append(f"L{point}" if is_open else f"M{point}h0")
        is_open = True
    return make_element("path", d="".join(commands), **style_stroke(stroke))


def style_stroke(stroke: Stroke) -> dict[str, str | float | None]:
    return {
        "class": "curve parted" if stroke.is_parted else "curve",
        "stroke_width": stroke.width,
        "style": f"--part:{stroke.percent}%",
        "stroke_dasharray": stroke.dashes,
    }


def thin_out(losses: Sequence[float | None]) -> list[tuple[int, float | None]]:
    """Return steps with their losses; of a long run the extremes of each stretch of steps, and what cannot be drawn."""
    points = list(enumerate(losses, 1))
    length = math.ceil(2 * len(points) / MOST_POINTS)
    if length < 3:
        return points
    kept: list[tuple[int, float | None]] = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        finite = [(step, loss) for step, loss in stretch if loss is not None and is_drawable(loss)]
        extremes = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])} if finite else set()
        kept += (
            sorted(extremes)
            if len(finite) == len(stretch)
            else sorted({*extremes, next(p for p in stretch if not is_drawable(p[1]))})
        )
    return kept


def locate_step(step: int, steps: int) -> float:
    """Return where the middle of a step lies between the left end of the axis, 0, and the right one, 1."""
    return (step - 0.5) / steps


def draw_line(x: tuple[str, str], y: tuple[str, str], name: str) -> Markup:
    return make_element("line", x1=x[0], x2=x[1], y1=y[0], y2=y[1], class_=name)


def draw_first_step(first: int | None, steps: int) -> Markup | None:
    """Return the mark of the step where runs part, with its name on the side that has room for it."""
    if not first or first > steps:
        return None
    place = locate_step(first, steps)
    at = f"{100 * place:.2f}%"
    is_left = place < 0.6
    name = make_element(
        "text", f"step {first}", x=at, y=14, dx=6 if is_left else -6, text_anchor="start" if is_left else "end", class_="mark"
    )
    return make_element("g", draw_line((at, at), ("0", "100%"), "first"), name)


def draw_not_finite(curve: Curve, steps: int, stroke: Stroke) -> Markup | None:
    """Return a cross at the first step whose loss cannot be drawn; nothing where there is none."""
    for step, loss in enumerate(curve.losses, 1):
        if loss is not None and not is_drawable(loss):
            name = "cross parted" if stroke.is_parted else "cross"
            return make_element(
                "text", CROSS, x=f"{100 * locate_step(step, steps):.2f}%", y=32, text_anchor="middle", class_=name
            )
    return None


def draw_labels(axis: Axis) -> Markup:
    """Return the numbers beside the plot, which the title of the picture stands in for where a page is read aloud."""
    texts = axis.write_ticks()
    labels = [
        make_element("span", text, style=f"top:{100 * (1 - axis.place(tick)):.2f}%")
        for tick, text in zip(axis.ticks, texts, strict=True)
    ]
    return make_element("div", labels, class_="y-labels", style=f"width:{max(map(len, texts), default=1)}ch", aria_hidden="true")


def draw_step_labels(steps: Sequence[int]) -> Markup:
    """Return the numbers of steps below a plot."""
    labels = [
        make_element("span", steps[at], style=f"left:{100 * locate_step(at + 1, len(steps)):.2f}%") for at in choose_steps(steps)
    ]
    return make_element("div", labels, class_="x-labels", aria_hidden="true")


def draw_legend(curve: Curve, stroke: Stroke, words: str) -> Markup:
    line = make_element("path", d="M3 8H37", **style_stroke(stroke))
    swatch = make_element("svg", line, viewBox="0 0 40 16", width=40, height=16, aria_hidden="true")
    return make_element("li", swatch, make_element("span", make_element("b", curve.name), " ", words))
