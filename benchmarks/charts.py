"""The charts of RESULTS.md and of the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import results
from grid import DEFAULT, KERAS, LIMIT, WITHOUT
from kernel_cases import WHOLE
from kernels import KERNELS, PEAK, TORCH, XLA

FAMILIES = {
    "Unisono": (DEFAULT,),
    "Unisono without kernels": (WITHOUT,),
    "Keras on JAX": (KERAS, "Keras DataParallel on JAX"),
    "TensorFlow": ("Keras on TensorFlow", "tf.distribute"),
    "torch": ("torch by hand", "torch DDP", "Keras on torch"),
}
"""What a chart shows of the contenders: of each framework the fastest."""

OTHERS = list(FAMILIES)[2:]
COLOURS = {
    "Unisono": "#c0392b",
    "Unisono without kernels": "#e6a49c",
    "Keras on JAX": "#b8b8b8",
    "TensorFlow": "#7f9bb8",
    "torch": "#2c5a8c",
    KERNELS: "#c0392b",
    XLA: "#e6a49c",
    TORCH: "#2c5a8c",
}


def draw_peers(path: Path, outcomes: dict[str, Any]) -> None:
    """Draw how fast each framework is, beside the fastest other framework, for each workload."""
    took = {workload: find_fastest_times(one) for workload, one in outcomes.items()}
    speeds: dict[str, list[float]] = {name: [] for name in FAMILIES}
    limits: list[float] = []
    for workload, seconds in took.items():
        base = min((seconds[name] for name in OTHERS if name in seconds), default=min(seconds.values()))
        for name, row in speeds.items():
            row.append(base / seconds[name] if name in seconds else 0.0)
        limit = outcomes[workload].get(LIMIT, {}).get("seconds")
        limits.append(base / limit if limit else float("nan"))
    figure, axes = plt.subplots(figsize=(8.5, 0.85 * len(took) + 1.2))
    width = draw_bars(axes, [name.replace(", ", ",\n") for name in took], speeds)
    places = [place + (len(speeds) - 1) / 2 * width for place in range(len(took))]
    axes.plot(limits, places, "|", color="black", markersize=26, markeredgewidth=1.5, label="JAX by hand")
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("times as fast as the fastest other framework")
    place_legend(axes)
    save_figure(figure, path)


def find_fastest_times(one: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of the fastest contender of each framework that took part."""
    seconds = {name: outcome["seconds"] for name, outcome in one.items() if isinstance(outcome.get("seconds"), float)}
    families = {name: [seconds[member] for member in members if member in seconds] for name, members in FAMILIES.items()}
    return {name: min(members) for name, members in families.items() if members}


def draw_kernels(path: Path, rows: Sequence[results.Row], peak: Sequence[results.Row]) -> None:
    """Draw the rate of what a training step needs of each operation."""
    last = {row["operation"]: row for row in rows if row["part"] in ("together", WHOLE[1])}
    rates = {way: [row[f"{way}, GFLOP/s"] for row in last.values()] for way in (KERNELS, XLA, TORCH)}
    figure, axes = plt.subplots(figsize=(8.5, 0.6 * len(last) + 1.4))
    draw_bars(axes, [name.replace(", ", ",\n", 1) for name in last], rates)
    most = {row[""]: row["GFLOP/s"] for row in peak}
    if PEAK in most:
        axes.axvline(most[PEAK], color="black", linewidth=1, linestyle="--", label=f"{PEAK}, {most[PEAK]:.0f} GFLOP/s")
    axes.set_xlabel("GFLOP/s of the forward pass and the gradients")
    place_legend(axes)
    save_figure(figure, path)


def draw_bars(axes: Any, names: Sequence[str], groups: Mapping[str, Sequence[float]]) -> float:
    """Draw a group of bars for each name, and return how wide a bar is."""
    width = 0.8 / len(groups)
    for place, (label, values) in enumerate(groups.items()):
        axes.barh([i + place * width for i in range(len(names))], values, width, label=label, color=COLOURS[label])
    axes.set_yticks([i + 0.4 - width / 2 for i in range(len(names))], names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    return width


def place_legend(axes: Any) -> None:
    """Put the legend above, where no bar is."""
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncol=3, frameon=False, markerscale=0.4)


def draw_lines(path: Path, rows: Sequence[results.Row], along: str, by: str | None) -> None:
    """Draw milliseconds along a quantity, a line for each other column, and for each value of `by`."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for group in dict.fromkeys(row.get(by) for row in rows):
        own = [row for row in rows if row.get(by) == group]
        for column in dict.fromkeys(head for row in own for head in row if head not in (along, by)):
            points = [(row[along], row[column]) for row in own if column in row]
            axes.plot(*zip(*points, strict=True), marker="o", label=", ".join(filter(None, [group, column.removesuffix(", ms")])))
    axes.set_xscale("log", base=10 if along == "parameters" else 2)
    axes.set_yscale("log")
    axes.set_xlabel(along)
    axes.set_ylabel("ms a step")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
