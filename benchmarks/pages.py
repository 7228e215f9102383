"""Writes RESULTS.md and the charts, from the JSON that the benchmarks left in `measured`, in a folder for each machine.

python benchmarks/pages.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import charts
import results
from grid import BEST, list_contenders
from peers import FLOOR, make_row

TITLES = {
    "kernels": "Operations alone",
    "peak": "The most that the cores can do",
    "contract": "The contract against a plain psum",
    "memory": "Memory: the CIFAR net, batch 128, one device",
    "start": "Until the first step",
    "replicas": "A step against the number of replicas",
    "one batch": "Eight replicas on one device against one batch",
    "sizes": "A step against the size of the model",
    "loop": "A loop of the user's own against fit",
    "calls": "What Python does for a step",
    "devices": "Several devices, and several processes",
    "checkpoint": "What a save costs a training of 105 MB",
    "recording": "What a record of each step costs a training",
    "verification": "What it costs to verify each step",
    "recovery": "From the failure of a process to the next finished step",
    "recovery on ray": "On Ray: from the loss of a worker, or from the last step before a resize, to the next finished step",
    "streams": "A pass over a source whose rows take 2 ms each, in several processes",
}
"""The title of each part, by the name of its JSON."""

CHARTS = {"replicas": ("replicas", "workload"), "sizes": ("parameters", None)}
"""Lines: along what, and a line for each of what."""

HEAD = """# Benchmarks

`make bench` writes this page and its charts, with what was measured as JSON beside them, in a folder for each machine. The page shows the
machine of the newest run, and at its end what earlier runs found on others; a part that was not run on the newest machine says so. The
ratios say more than the milliseconds. A part or a workload that is run again by itself replaces what stood here of it, so that tables and
columns may be of different runs.

Where nothing else is said, a figure is a median over rounds in which the contenders take turns. The two cores of a virtual machine may be
the two threads of one core for some seconds: what was timed meanwhile is timed again ([cores.py](cores.py))."""

PEERS = """Milliseconds a step, each contender at the fastest of its settings ([grid.py](grid.py)): the fastest epoch, of several
processes that took turns with those of the others. Data are arrays in memory, shuffled each epoch. "JAX by hand" is a step without any
framework ([by_jax.py](by_jax.py)); "floor" is how long its operations take at the rate of a product of large matrices, which is XLA's.
Winograd's algorithm has fewer products than are counted here, and may be below the floor. Ratios say how many times as fast as the other
Unisono is. Figures in brackets are of contenders that were slower than one and a half times the fastest other framework when their
settings were looked at: they took no part in the rounds, and are the faster of two epochs. "failed": every time, or once in the rounds.
Empty: not measured."""

KERNELS = """GFLOP/s of the forward pass and of the gradients, in the programs that `fit` runs, with kernels and under `UNISONO_NATIVE=0`,
and in torch on as many threads. Operations are counted as a direct computation has them. Sizes are those of the workloads
([kernel_cases.py](kernel_cases.py)); "together" is all that a training step needs of the operation."""

DEVICES = """Milliseconds a step, the fastest epoch of processes that take turns. A device is a CPU device of one process; a process has one
device. Unisono has R = 8 on devices and R = 4 in processes, so rows of one kind have the same bits. "JAX by hand" is a step in `shard_map`,
which adds gradients by `psum`, without rewrites. A text says why there is no number."""

CALLS = """Per step of a dense net of 2 400 parameters, R = 8, on CPU devices of one process ([calls.py](calls.py)). "at most" are limits
that a test holds. All steps of one call of `fit` on one device are one run of an executable, which is no step's."""

TEXTS = {"kernels": KERNELS, "calls": CALLS, "devices": DEVICES}
"""What is said above a table."""

PLACEMENTS = "Milliseconds a step, looked at once, to find the fastest. Rows of one R have the same bits."


def format_page(folder: Path) -> str:
    """Return the whole page: the newest machine, then the others."""
    newest, *others = results.list_machines(folder)
    parts = [HEAD, describe_machine(newest), *format_peers(newest), *format_placements(folder, newest)]
    for name, title in TITLES.items():
        if machine := find_machine(name, folder):
            parts.append(f"## {title}")
            parts += [f"![{title}](measured/{machine.name}/{name}.png)"] if name in ("kernels", *CHARTS) else []
            parts += [TEXTS[name]] if name in TEXTS else []
            parts.append(describe_other(machine, newest))
            parts.append(results.format_table(results.read_result(machine, name)).strip())
    for other in others:
        parts += format_other(other)
    return "\n\n".join(part for part in parts if part) + "\n"


def format_other(machine: Path) -> list[str]:
    """Return what an earlier run found of others, and of operations alone."""
    peers, kernels = results.read_result(machine, "peers"), results.read_result(machine, "kernels")
    name = machine.name.replace("-", " ")
    parts = [f"## Another machine: {name}", describe_machine(machine)] if peers or kernels else []
    parts += [f"### Against others: {name}", format_peer_table(peers)] if peers else []
    if kernels:
        peak = {row[""]: row["GFLOP/s"] for row in results.read_result(machine, "peak")}
        rates = "; ".join(f"{what} {results.format_value(rate)}" for what, rate in peak.items())
        parts += [f"### Operations alone: {name}", f"GFLOP/s: {rates}.", results.format_table(kernels).strip()]
    return parts


def find_machine(part: str, folder: Path) -> Path | None:
    """Return the folder of the newest machine that has results of a part."""
    return next((machine for machine in results.list_machines(folder) if results.read_result(machine, part) is not None), None)


def describe_machine(machine: Path) -> str:
    """Return a list of what a machine is."""
    return "\n".join(f"- {what}: {value}" for what, value in (results.read_result(machine, "machine") or {}).items())


def format_peers(machine: Path) -> list[str]:
    outcomes = results.read_result(machine, "peers")
    if outcomes is None:
        return []
    return [
        "## Against others",
        f"![Speed against others](measured/{machine.name}/peers.png)",
        PEERS,
        format_peer_table(outcomes),
        "### The fastest settings",
        format_settings(outcomes),
    ]


def format_placements(folder: Path, newest: Path) -> list[str]:
    """Return the table of placements, of the newest machine on which they were tried."""
    for machine in results.list_machines(folder):
        if placed := list_placement_rows(results.read_result(machine, "peers") or {}):
            return [
                "### Each placement",
                describe_other(machine, newest),
                PLACEMENTS,
                "\n".join(transpose_table(placed)),
            ]
    return []


def describe_other(machine: Path, newest: Path) -> str:
    """Return a sentence that says of which machine a part is; nothing for the newest one."""
    return "" if machine == newest else f"Not of this machine: {machine.name.replace('-', ' ')}."


def format_peer_table(outcomes: dict[str, Any]) -> str:
    order = [*list_contenders(2, is_image=True), FLOOR]
    ordered = {workload: dict(sorted(one.items(), key=lambda item: order.index(item[0]))) for workload, one in outcomes.items()}
    return "\n".join(transpose_table([make_row(workload, one) for workload, one in ordered.items()]))


def transpose_table(rows: Sequence[results.Row]) -> list[str]:
    """Return a table with workloads as columns."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    cells = [[head, *(results.format_value(row.get(head, "")) for row in rows)] for head in heads]
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return [f"| {' | '.join(line)} |" for line in lines]


def format_settings(outcomes: dict[str, Any]) -> str:
    lines = []
    for workload, one in outcomes.items():
        chosen = [f"{name} {json.dumps(outcome['best'])}" for name, outcome in one.items() if outcome.get("best")]
        lines.append(f"- {workload}: {'; '.join(chosen)}")
    return "\n".join(lines)


def list_placement_rows(outcomes: dict[str, Any]) -> list[results.Row]:
    """Return a row for each workload, with the milliseconds of each placement that was tried."""
    return [
        {"workload": workload}
        | {name_placement(setting): 1e3 * took for setting, took in one[BEST]["grid"] if isinstance(took, float)}
        for workload, one in outcomes.items()
        if BEST in one
    ]


def name_placement(setting: dict[str, Any]) -> str:
    said = setting["strategy"]
    return f"R = {said['replicas']} on {said['devices']} device{'s' * (said['devices'] > 1)}, ms" if said else "default, ms"


def main() -> None:
    measured = Path(sys.argv[1]) / "measured"
    newest = results.list_machines(measured)[0]
    if (outcomes := results.read_result(newest, "peers")) is not None:
        charts.draw_peers(newest / "peers.png", outcomes)
    if machine := find_machine("kernels", measured):
        charts.draw_kernels(
            machine / "kernels.png", results.read_result(machine, "kernels"), results.read_result(machine, "peak")
        )
    for name, (along, by) in CHARTS.items():
        if machine := find_machine(name, measured):
            charts.draw_lines(machine / f"{name}.png", results.read_result(machine, name), along, by)
    (measured.parent / "RESULTS.md").write_text(format_page(measured))


if __name__ == "__main__":
    main()
