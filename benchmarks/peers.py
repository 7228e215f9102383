"""A step of every contender on every workload, in one run: each at the fastest of its grid, in fresh processes that take turns.

python benchmarks/peers.py [--rounds N] [--workloads NAME ...] [--contenders NAME ...] [--grid FILE]

First the settings of each contender, one after another, once; then the fastest of each in turns, N times. What a setting took, or why
it failed, is kept with the results; `--grid` takes the settings from an earlier run's. The floor is how long the operations of the step
written by hand take at the rate of a product of large matrices. What is found of a workload replaces what was found of it before.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

import results
from grid import BEST, DEFAULT, KERAS, LIMIT, Contender, Settings, contenders, fastest, searched
from workloads import MORE, WORKLOADS

HERE = pathlib.Path(__file__).parent
LONGEST = 150.0
"""Seconds for a process; Keras' DataParallel hangs now and then on CPU."""
FLOOR = "floor"

Found = dict[str, Any]


def printed(command: tuple[str, ...], workload: str, settings: Settings, backend: str = "jax") -> Any:
    """What a script of this folder found, or why there is nothing."""
    script, *words = command
    line = [sys.executable, str(HERE / script), *words, workload, json.dumps(settings)]
    environment = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=LONGEST, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return f"longer than {LONGEST:g} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
    return json.loads(done.stdout.splitlines()[-1])


def measured(contender: Contender, workload: str, settings: Settings) -> float | str:
    """Seconds a step, or why there is no such number."""
    found = printed(contender.command, workload, settings, contender.backend)
    return found if isinstance(found, str) else statistics.median(found)


def of_grid(workload: str, part: dict[str, Contender]) -> Found:
    """Of each contender: what its settings took, and the fastest."""
    found: Found = {}
    for name, contender in part.items():
        choices = {setting: of[:1] if results.SMALL else of for setting, of in contender.grid.items()}
        tried = searched(choices, functools.partial(measured, contender, workload))
        found[name] = {"grid": tried, "best": fastest(tried)}
        print(f"{workload}: {name}: " + "; ".join(f"{settings} {said(took)}" for settings, took in tried), flush=True)
    return found


def compared(workload: str, part: dict[str, Contender], grid: Found | None, rounds: int) -> Found:
    """The fastest of each in turns."""
    found = {name: one | {"rounds": []} for name, one in (grid or of_grid(workload, part)).items() if name in part}
    for _ in range(rounds):
        for name, one in found.items():
            if one["best"] is not None and not failures(one):
                one["rounds"].append(measured(part[name], workload, one["best"]))
    for name, one in found.items():
        numbers = [took for took in one["rounds"] if isinstance(took, float)]
        one["seconds"] = statistics.median(numbers) if numbers and not failures(one) else None
        one["is_peer"] = part[name].is_peer
    if workload in WORKLOADS:
        found[FLOOR] = {"seconds": printed(("floor.py",), workload, {}), "is_peer": False}
    return found


def failures(one: Found) -> list[str]:
    """Why it took no part in a round; it is not asked again."""
    return [took for took in one["rounds"] if isinstance(took, str)]


def said(took: float | str) -> str:
    return took if isinstance(took, str) else f"{1e3 * took:.3g} ms"


def row(workload: str, found: Found) -> results.Row:
    """Milliseconds a step, and the ratios that are asked for: how many times as fast as."""
    seconds = {name: one["seconds"] for name, one in found.items() if isinstance(one["seconds"], float)}
    peers = [seconds[name] for name, one in found.items() if one["is_peer"] and name in seconds]
    ratios = {
        "default to the best peer": (min(peers, default=None), seconds.get(DEFAULT)),
        "default to Keras on JAX": (seconds.get(KERAS), seconds.get(DEFAULT)),
        "best to JAX by hand": (seconds.get(LIMIT), seconds.get(BEST)),
    }
    return (
        {"workload": workload}
        | {f"{name}, ms": 1e3 * seconds[name] if name in seconds else "failed" for name in found}
        | {name: theirs / ours for name, (theirs, ours) in ratios.items() if theirs and ours}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1 if results.SMALL else 3)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS | MORE), metavar="NAME")
    parser.add_argument("--contenders", nargs="+", metavar="NAME")
    parser.add_argument("--grid", type=pathlib.Path)
    given = parser.parse_args()
    known = json.loads(given.grid.read_text()) if given.grid else {}
    found: dict[str, Found] = results.kept("peers") or {}
    for workload in given.workloads:
        everybody = contenders(os.cpu_count() or 1, is_image=workload.startswith(("W1", "W2", "W6", "W7")))
        part = {name: everybody[name] for name in given.contenders or everybody}
        found[workload] = compared(workload, part, known.get(workload), given.rounds)
        results.keep("peers", {name: found[name] for name in WORKLOADS | MORE if name in found})
    print(results.table([row(workload, found[workload]) for workload in given.workloads]))


if __name__ == "__main__":
    main()
