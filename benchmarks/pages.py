"""RESULTS.md and the charts, from the JSON that the benchmarks left in `measured`, in a folder.

python benchmarks/pages.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import results
from grid import BEST, DEFAULT, KERAS, LIMIT
from peers import FLOOR
from peers import row as row_of

TITLES = {
    "contract": "The contract against a plain psum",
    "memory": "Memory: the CIFAR net, batch 128, one device",
    "start": "Until the first step",
    "replicas": "A step against the number of replicas",
    "sizes": "A step against the size of the model",
    "loop": "A loop of the user's own against fit",
    "checkpoint": "What a save costs a training of 105 MB",
    "recovery": "From the failure of a process to the next finished step",
}
"""Of each part, by the name of its JSON."""

HEAD = """# Benchmarks

`make bench` writes this page and its charts, with what was measured as JSON beside them. Where nothing else is said, a figure is a
median over rounds in which the contenders take turns; the page is of one machine, and the ratios say more than the milliseconds. A part or a
workload that is run again by itself replaces what stood here of it, so that tables and columns may be of different runs.
"""


def page(folder: Path) -> str:
    """What is there."""
    parts = [HEAD]
    if (machine := read(folder, "machine")) is not None:
        parts.append("\n".join(f"- {what}: {value}" for what, value in machine.items()))
    if (found := read(folder, "peers")) is not None:
        rows = [row_of(workload, one) for workload, one in found.items()]
        parts += ["## Against others", "![Speed against others](measured/peers.png)", PEERS]
        parts += ["\n".join(turned(rows)), "### The fastest settings", settings(found)]
        if placed := placements(found):
            parts += ["### Each placement", PLACEMENTS, "\n".join(turned(placed))]
    for name, title in TITLES.items():
        if (rows := read(folder, name)) is not None:
            chart = f"![{title}](measured/{name}.png)\n\n" if name in CHARTS else ""
            parts.append(f"## {title}\n\n{chart}{results.table(rows).strip()}")
    return "\n\n".join(parts) + "\n"


PEERS = """Milliseconds a step, each contender at the fastest of its settings ([grid.py](grid.py)). Data are arrays in memory, shuffled each
epoch. "JAX by hand" is a step without any framework ([by_jax.py](by_jax.py)); "floor" is how long its operations take at the rate of a
product of large matrices. Ratios say how many times as fast as the other Unisono is.
"failed": every time, or once in the rounds."""


def turned(rows: Sequence[results.Row]) -> list[str]:
    """Workloads as columns."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    cells = [[head, *(results.shown(row.get(head, "")) for row in rows)] for head in heads]
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return [f"| {' | '.join(line)} |" for line in lines]


def settings(found: dict[str, Any]) -> str:
    lines = []
    for workload, one in found.items():
        chosen = [f"{name} {json.dumps(of['best'])}" for name, of in one.items() if of.get("best")]
        lines.append(f"- {workload}: {'; '.join(chosen)}")
    return "\n".join(lines)


PLACEMENTS = "Milliseconds a step, looked at once, to find the fastest. Rows of one R have the same bits."


def placements(found: dict[str, Any]) -> list[results.Row]:
    """A row for each workload, with what it took on each placement that was tried."""
    return [
        {"workload": workload} | {placement(setting): 1e3 * seconds for setting, seconds in one[BEST]["grid"] if seconds}
        for workload, one in found.items()
        if BEST in one
    ]


def placement(setting: dict[str, Any]) -> str:
    said = setting["strategy"]
    return f"R = {said['replicas']} on {said['devices']} device{'s' * (said['devices'] > 1)}, ms" if said else "default, ms"


def draw_peers(folder: Path, found: dict[str, Any]) -> None:
    """How many times as fast as Keras' own fit on JAX."""
    base = {workload: base_of(one) for workload, one in found.items()}
    names = list(dict.fromkeys(name for one in found.values() for name in one if name != FLOOR))
    figure, axes = plt.subplots(figsize=(12, 5))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        speeds = [base[workload] / (found[workload].get(name, {}).get("seconds") or float("inf")) for workload in base]
        colour = {DEFAULT: "tab:red", BEST: "firebrick", LIMIT: "black"}.get(name)
        axes.bar(
            [i + place * width for i in range(len(base))],
            speeds,
            width,
            label=name,
            color=colour or plt.cm.Blues(0.25 + place / 10),
        )
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(base))], [name.replace(", ", ",\n") for name in base], fontsize=8)
    axes.set_ylabel("times as fast as Keras' fit on JAX")
    axes.legend(fontsize=7, ncol=2)
    save(figure, folder / "peers.png")


def base_of(one: dict[str, Any]) -> float:
    """Keras on JAX; where it did not take part, ours."""
    return next(one[name]["seconds"] for name in (KERAS, DEFAULT) if one.get(name, {}).get("seconds"))


def draw_lines(path: Path, rows: Sequence[results.Row], along: str, by: str | None) -> None:
    """Milliseconds along a quantity, a line for each other column, and for each value of `by`."""
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
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def read(folder: Path, name: str) -> Any:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


CHARTS = {"replicas": ("replicas", "workload"), "sizes": ("parameters", None)}


def main() -> None:
    folder = Path(sys.argv[1]) / "measured"
    if (found := read(folder, "peers")) is not None:
        draw_peers(folder, found)
    for name, (along, by) in CHARTS.items():
        if (rows := read(folder, name)) is not None:
            draw_lines(folder / f"{name}.png", rows, along, by)
    (folder.parent / "RESULTS.md").write_text(page(folder))


if __name__ == "__main__":
    main()
