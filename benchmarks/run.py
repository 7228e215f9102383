"""All benchmarks, one after another, and what they found as RESULTS.md with charts.

python benchmarks/run.py [--out FOLDER] [--parts NAME ...]

Every part writes its rows as JSON into `measured` there; the page and the charts are made of what lies there, so that a part can be run
again by itself. `make bench` writes into this folder. With UNISONO_BENCHMARKS_SMALL=1 every part does as little as shows that it works.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import results

HERE = Path(__file__).parent
PARTS = ("peers", "contract", "memory", "start", "scaling", "loop", "checkpoint", "recovery")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, metavar="NAME")
    given = parser.parse_args()
    os.environ |= {
        "UNISONO_BENCHMARKS": str((given.out / "measured").resolve()),
        "KERAS_BACKEND": "jax",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    results.keep_machine()
    for part in given.parts:
        print(f"## {part}", flush=True)
        subprocess.run([sys.executable, str(HERE / f"{part}.py")], check=True)
    subprocess.run([sys.executable, str(HERE / "pages.py"), str(given.out)], check=True)


if __name__ == "__main__":
    main()
