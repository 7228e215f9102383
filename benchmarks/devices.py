"""A step on several devices of one process, and in several processes, beside others: in fresh processes that take turns.

python benchmarks/devices.py [--rounds N] [--workloads NAME ...] [--contenders NAME ...]

Prints milliseconds a step, those of the fastest epoch. Unisono has R = 8 on 1 to 8 CPU devices of a process, and R = 4 in 1 to 4 processes of
one device. A contender that failed is not run again: its cell says why. What is found of a workload replaces what was found of it
before.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import NamedTuple

import results
from by_keras import LAUNCHED
from grid import LIMIT, Contender, Settings, list_contenders
from peers import measure_settings
from workloads import TINY

CHOSEN = [TINY, "W1 MNIST, two convolutions", "W2 CIFAR", "W3 MLP, batch 32", "W4 transformer"]
OURS = "Unisono"
BY_DEVICES, BY_PROCESSES = "devices", "processes"
REPLICAS = {BY_DEVICES: 8, BY_PROCESSES: 4}
COUNTS = {BY_DEVICES: (2,) if results.SMALL else (1, 2, 4, 8), BY_PROCESSES: (2,) if results.SMALL else (1, 2, 4)}
"""On how many devices of a process, and in how many processes."""


class Column(NamedTuple):
    """A contender, in rows of one kind.

    Args:
        contender: What trains.
        kind: Whether rows are numbers of devices or of processes.
        settings: Makes its settings from that number.
        launch: What `unisono launch`, which starts its processes, is told beside their number; None: it starts nothing.
    """

    contender: Contender
    kind: str
    settings: Callable[[int], Settings]
    launch: tuple[str, ...] | None = None


def list_columns(workload: str, replicas: Mapping[str, int] = REPLICAS) -> list[tuple[str, Column]]:
    """Return the contenders by name; ours is there twice."""
    is_image = workload.startswith(("W1", "W2"))
    everybody = list_contenders(os.cpu_count() or 1, is_image)
    by_devices = lambda count: {"devices": count}  # noqa: E731
    launched = Contender(("by_keras.py", LAUNCHED), {}, is_peer=False)
    ours = Contender(("by_keras.py", "ours"), {}, is_peer=False)
    others = {name: everybody[name] for name in ("Keras DataParallel on JAX", "tf.distribute")}
    return [
        (OURS, Column(ours, BY_DEVICES, lambda count: {"strategy": {"devices": count, "replicas": replicas[BY_DEVICES]}})),
        (
            OURS,
            Column(
                launched, BY_PROCESSES, lambda _: {"strategy": {"devices": 1, "replicas": replicas[BY_PROCESSES]}}, ("--cpu",)
            ),
        ),
        *((name, Column(contender, BY_DEVICES, by_devices)) for name, contender in others.items()),
        (
            "torch DDP",
            Column(everybody["torch DDP"], BY_PROCESSES, lambda count: {"processes": count, "channels_last": is_image}),
        ),
        (LIMIT, Column(everybody[LIMIT], BY_DEVICES, lambda count: {"form": {"devices": count}})),
    ]


def measure_row(workload: str, columns: list[tuple[str, Column]], kind: str, count: int, rounds: int) -> results.Row:
    """Return what a step takes on so many devices, or in so many processes, by each contender that has rows of this kind."""
    found: dict[str, list[float | str]] = {name: [] for name, _ in columns}
    for _ in range(rounds):
        for name, column in columns:
            if column.kind == kind and not list_reasons(found[name]):
                words = () if column.launch is None else ("--processes", str(count), "--devices-per-process", "1", *column.launch)
                found[name].append(measure_settings(column.contender, workload, column.settings(count), launch=words))
    return {"workload": workload, "on": format_count(count, kind)} | {
        f"{name}, ms": format_found(one) for name, one in found.items()
    }


def format_count(count: int, kind: str) -> str:
    """Return the name of a row.

    >>> format_count(1, BY_PROCESSES), format_count(8, BY_DEVICES)
    ('1 process', '8 devices')
    """
    return f"{count} {kind if count > 1 else kind.removesuffix('es' if kind == BY_PROCESSES else 's')}"


def list_reasons(found: list[float | str]) -> list[str]:
    """Return why a contender failed."""
    return [took for took in found if isinstance(took, str)]


def format_found(found: list[float | str]) -> float | str:
    """Return the milliseconds of the fastest round; the reason of a failure; nothing where it was not to run.

    >>> format_found([0.25, 0.5]), format_found([0.25, "Error: a | b"]), format_found([])
    (250.0, 'failed: Error: a / b', '')
    """
    if reasons := list_reasons(found):
        return f"failed: {reasons[0][:80].replace('|', '/')}"
    return 1e3 * min(took for took in found if isinstance(took, float)) if found else ""


def main() -> None:
    names = list(dict(list_columns(TINY)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1 if results.SMALL else 2)
    parser.add_argument("--workloads", nargs="+", default=CHOSEN[: 1 if results.SMALL else None], choices=CHOSEN, metavar="NAME")
    parser.add_argument("--contenders", nargs="+", default=names, choices=names, metavar="NAME")
    given = parser.parse_args()
    kept: list[results.Row] = results.read_kept("devices") or []
    for workload in given.workloads:
        columns = [(name, column) for name, column in list_columns(workload) if name in given.contenders]
        with tempfile.TemporaryDirectory() as programs:  # compiled once: compiling is not what is timed
            os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
            counts = [(kind, count) for kind, some in COUNTS.items() for count in some]
            rows = [measure_row(workload, columns, kind, count, given.rounds) for kind, count in counts]
        kept = [row for row in kept if row["workload"] != workload] + rows
        results.keep_rows("devices", sorted(kept, key=lambda row: CHOSEN.index(row["workload"])))
    print(results.format_table([row for row in kept if row["workload"] in given.workloads]), flush=True)


if __name__ == "__main__":
    main()
