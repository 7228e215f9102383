"""The results of a benchmark: a table on the screen, and rows as JSON in the folder that $UNISONO_BENCHMARKS names, if it is set."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

SMALL = os.environ.get("UNISONO_BENCHMARKS_SMALL") == "1"
"""Whether to do as little as shows that everything works."""

Row = dict[str, Any]


def keep_rows(name: str, rows: Any) -> None:
    if folder := os.environ.get("UNISONO_BENCHMARKS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")


def read_kept(name: str) -> Any:
    """Return the rows that were kept under this name; None where there are none."""
    path = Path(os.environ.get("UNISONO_BENCHMARKS", ""), f"{name}.json")
    return json.loads(path.read_text()) if "UNISONO_BENCHMARKS" in os.environ and path.exists() else None


def read_result(folder: Path, name: str) -> Any:
    """Return what is kept under this name in the folder of a machine; None where it has nothing of this name."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def list_machines(folder: Path) -> list[Path]:
    """Return the folders of the machines, that of the newest run first; of one day, that with most parts."""

    def rank(machine: Path) -> tuple[str, int, str]:
        return (read_result(machine, "machine") or {}).get("date", ""), len(list(machine.glob("*.json"))), machine.name

    return sorted((one for one in folder.iterdir() if one.is_dir()), key=rank, reverse=True)


def keep_machine() -> None:
    """Keep the processor, the versions and the date."""
    keep_rows("machine", describe_machine())


def describe_machine(*more: str) -> Row:
    """Return the processor, the date and the versions, also those of `more` packages."""
    names = ("unisono", "keras", "jax", "jaxlib", "tensorflow-cpu", "torch", "numpy", *more)
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    machine = {
        "processor": f"{os.cpu_count()} x {read_processor()}",
        "native kernels": describe_kernels(),
        "python": platform.python_version(),
    }
    return machine | {"date": datetime.date.today().isoformat()} | versions


def read_processor() -> str:
    """Return what the processor calls itself."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def name_machine() -> str:
    """Return the name of a folder: the processor and the level of its kernels. One name may stand for many processors in virtual machines."""
    processor = re.sub(r"\((R|TM)\)|processor", "", read_processor(), flags=re.IGNORECASE)
    level, comma, _ = describe_kernels().partition(", build ")
    return re.sub(r"[^a-z0-9]+", "-", f"{processor} {level if comma else 'without kernels'}".lower()).strip("-")


def describe_kernels() -> str:
    """Return what this installation says of its native kernels."""
    done = subprocess.run(
        [sys.executable, "-c", "import unisono; print(unisono.native)"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip().removeprefix("native kernels for ")


def format_table(rows: Sequence[Row]) -> str:
    """Return Markdown; the keys of all rows are the heads."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = [heads, ["---"] * len(heads), *([format_value(row.get(head, "")) for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def format_value(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def report_rows(name: str, rows: Sequence[Row]) -> None:
    """Keep the rows of a benchmark, and print them."""
    keep_rows(name, list(rows))
    print(format_table(rows), flush=True)
