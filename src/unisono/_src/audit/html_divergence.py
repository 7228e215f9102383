"""The plot of a divergence: a strip of steps for each layer, darker where more of the layer's variables differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from unisono._src.audit.audit_report import Divergence
from unisono._src.audit.html_elements import Markup, make_element
from unisono._src.audit.html_losses import draw_step_labels
from unisono._src.audit.html_numbers import count_nouns

MOST_LAYERS = 60
MOST_COLUMNS = 240
LEVELS = ("none", "up to a quarter", "up to half", "up to three quarters", "all or nearly all")
"""How much of a layer differs, by shade."""


class Strip(NamedTuple):
    """The steps of a layer."""

    layer: str
    fractions: Sequence[float]
    first: int | None
    """The index of the first step that differs; None where none does."""


def draw_divergence(divergence: Divergence, layer: str | None) -> Markup:
    """Return the figure of a pair of runs. `layer` is the one where the audit says that they part."""
    strips = [make_strip(*pair) for pair in zip(divergence.layers, divergence.fractions, strict=True)]
    shown = choose_strips(strips)
    firsts = [strip.first for strip in strips if strip.first is not None]
    first = min(firsts, default=None)
    groups = group_steps(len(divergence.steps))
    mark = None if first is None else next(at for at, group in enumerate(groups) if first in group)
    rows = [draw_row(strip, divergence.steps, groups, mark, is_part_of(strip.layer, layer)) for strip in shown]
    left_out = len(strips) - len(shown)
    notes = [
        f"Each cell is the largest of {len(groups[0])} steps." if len(groups) < len(divergence.steps) else None,
        f"{count_nouns(left_out, 'more layer')} {'is' if left_out == 1 else 'are'} not shown." if left_out else None,
    ]
    head = make_element("tr", [make_element("th", text, scope="col") for text in ("Layer", "Steps", "Differs from")])
    steps = [divergence.steps[group[0]] for group in groups]
    foot = make_element("tr", make_element("td", ""), make_element("td", draw_step_labels(steps)), make_element("td", ""))
    return make_element(
        "figure",
        make_element("figcaption", make_element("b", divergence.runs[0]), " and ", make_element("b", divergence.runs[1])),
        make_element(
            "table",
            make_element("thead", head),
            make_element("tbody", rows),
            make_element("tfoot", foot, aria_hidden="true"),
            class_="heat",
        ),
        [make_element("p", note, class_="note") for note in notes if note],
    )


def draw_levels() -> Markup:
    """Return the legend of the shades."""
    swatches = [
        make_element(
            "li",
            make_element(
                "svg", make_element("rect", width=14, height=14, class_=f"level{level}"), width=14, height=14, aria_hidden="true"
            ),
            name,
        )
        for level, name in enumerate(LEVELS)
    ]
    return make_element("ul", swatches, class_="levels")


def has_difference(divergence: Divergence) -> bool:
    return any(fraction > 0 for fractions in divergence.fractions for fraction in fractions)


def make_strip(layer: str, fractions: Sequence[float]) -> Strip:
    return Strip(layer, fractions, next((at for at, fraction in enumerate(fractions) if fraction > 0), None))


def choose_strips(strips: Sequence[Strip]) -> list[Strip]:
    """Return the layers to show, in their order: those that differ first, where there are too many."""
    by_first = sorted(range(len(strips)), key=lambda at: math.inf if strips[at].first is None else strips[at].first or 0)
    return [strips[at] for at in sorted(by_first[:MOST_LAYERS])]


def group_steps(steps: int) -> list[range]:
    """Return the indices of the steps that share a column."""
    length = max(1, math.ceil(steps / MOST_COLUMNS))
    return [range(start, min(start + length, steps)) for start in range(0, steps, length)]


def is_part_of(name: str, layer: str | None) -> bool:
    """Return whether a layer is the given one, or one of the two lies in the other."""
    return layer is not None and (f"{name}/".startswith(f"{layer}/") or f"{layer}/".startswith(f"{name}/"))


def draw_row(strip: Strip, steps: Sequence[int], groups: Sequence[range], mark: int | None, is_named: bool) -> Markup:
    is_first = strip.first is not None and mark is not None and strip.first in groups[mark] and is_named
    said = "the same" if strip.first is None else f"step {steps[strip.first]}"
    label = [
        make_element("span", "▸ ", aria_hidden="true") if is_first else None,
        make_element("span", strip.layer, class_="quoted"),
    ]
    return make_element(
        "tr",
        make_element("th", label, scope="row", title=strip.layer),
        make_element("td", draw_strip(strip, groups, mark, said)),
        make_element("td", said, class_="number"),
        class_="named" if is_first else None,
    )


def draw_strip(strip: Strip, groups: Sequence[range], mark: int | None, said: str) -> Markup:
    """Return the picture of a layer's steps. Cells of one shade are one path, so that a page of many stays small."""
    levels = [find_level(max(strip.fractions[at] for at in group)) for group in groups]
    paths = [draw_cells(levels, level) for level in range(1, len(LEVELS)) if level in levels]
    largest = max(strip.fractions, default=0.0)
    words = f"{strip.layer}: {said}" if strip.first is None else f"{strip.layer}: differs from {said} on, at most {largest:.0%}"
    return make_element(
        "svg",
        make_element("title", words),
        paths,
        None if mark is None else make_element("path", d=f"M{mark} 0V1", class_="first"),
        viewBox=f"0 0 {max(1, len(groups))} 1",
        preserveAspectRatio="none",
        role="img",
        class_="strip",
    )


def find_level(fraction: float) -> int:
    """Return the shade of a fraction: 0 for none, up to 4."""
    return min(len(LEVELS) - 1, math.ceil(fraction * (len(LEVELS) - 1))) if fraction > 0 else 0


def draw_cells(levels: Sequence[int], level: int) -> Markup:
    """Return the cells of a shade, neighbours in one piece."""
    commands: list[str] = []
    at = 0
    while at < len(levels):
        end = at
        while end < len(levels) and levels[end] == level:
            end += 1
        if end > at:
            commands.append(f"M{at} 0H{end}V1H{at}z")
        at = max(end, at + 1)
    return make_element("path", d="".join(commands), class_=f"level{level}")
