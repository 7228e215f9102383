"""Runs all benchmarks, one after another, and writes RESULTS.md with charts.

python benchmarks/run.py [--out FOLDER] [--machine NAME] [--parts NAME ...] [--missing]

Every part writes its rows as JSON into `measured/MACHINE` there; the page and the charts are made of what lies there, so that a part can
be run again by itself. A machine is called by its processor and the level of its kernels, unless `--machine` names it. `--missing` goes on
with a run that was interrupted: it leaves out parts of which this machine has results. `make bench` writes into this folder. With
UNISONO_BENCHMARKS_SMALL=1 every part does as little as shows that it works.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import results

HERE = Path(__file__).parent
PARTS = {
    "peers": "peers",
    "kernels": "kernels",
    "contract": "contract",
    "memory": "memory",
    "start": "start",
    "scaling": "sizes",
    "loop": "loop",
    "calls": "calls",
    "devices": "devices",
    "checkpoint": "checkpoint",
    "recording": "recording",
    "verification": "verification",
    "recovery": "recovery",
    "streams": "streams",
}
"""The parts, each with the JSON that it writes last."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--machine", metavar="NAME")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS), metavar="NAME")
    parser.add_argument("--missing", action="store_true")
    given = parser.parse_args()
    folder = (given.out / "measured" / (given.machine or results.name_machine())).resolve()
    os.environ |= {
        "UNISONO_BENCHMARKS": str(folder),
        "KERAS_BACKEND": "jax",
        "OPENBLAS_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    results.keep_machine()
    for part in given.parts:
        again = ["--missing"] if given.missing and part == "peers" else []
        if given.missing and not again and (folder / f"{PARTS[part]}.json").exists():
            continue
        print(f"## {part}", flush=True)
        subprocess.run([sys.executable, str(HERE / f"{part}.py"), *again], check=True)
    subprocess.run([sys.executable, str(HERE / "pages.py"), str(given.out)], check=True)


if __name__ == "__main__":
    main()
