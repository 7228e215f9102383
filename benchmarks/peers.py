"""A step of every contender on every workload, in one run: each at the fastest of its grid, in fresh processes that take turns.

python benchmarks/peers.py [--rounds N] [--workloads NAME ...] [--missing] [--contenders NAME ...] [--grid FILE]

First the settings of each contender, one after another, for two epochs; then the fastest of each in turns, N times, for all epochs. The
fastest epoch counts: what other work on the machine costs is no contender's. A contender that is slower than one and a half times the
fastest peer takes no part in the turns: its figure is that of the first look. What a setting took, or why it failed, is kept with the
results; `--grid` takes the settings from an earlier run's. The floor is how long the operations of the step written by hand take at the
rate of a product of large matrices. What is found of a workload replaces what was found of it before; `--missing` measures only workloads
of which nothing was found.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import results
from grid import BEST, DEFAULT, KERAS, LIMIT, Contender, Settings, find_fastest, list_contenders, search_settings
from timing import EPOCHS
from workloads import MORE, WORKLOADS

HERE = pathlib.Path(__file__).parent
LONGEST = 180.0
"""Seconds for a process; Keras' DataParallel hangs now and then on CPU."""
FLOOR = "floor"
NOTHING: Settings = {"strategy": {}}
"""The settings of the best that are the default's: it is not measured twice."""
SLOW = 1.5
"""Contenders that are slower than so many times the fastest peer take no part in the turns."""

Outcomes = dict[str, Any]


def run_script(
    command: tuple[str, ...], workload: str, settings: Settings, variables: Mapping[str, str], launch: Sequence[str] = ()
) -> Any:
    """Return the result that a script of this folder printed, or the reason of its failure.

    With words for `unisono launch`, it runs in several processes, of which the first tells.
    """
    script, *words = command
    launcher = ["-m", "unisono", "launch", *launch] if launch else []
    line = [sys.executable, *launcher, str(HERE / script), *words, workload, json.dumps(settings)]
    environment = os.environ | {"KERAS_BACKEND": "jax", "OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"} | variables
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=LONGEST, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return f"longer than {LONGEST:g} s"
    if done.returncode:
        if done.returncode < 0:  # the end of a dump of its stack says nothing
            return f"ended by {signal.Signals(-done.returncode).name}"
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines() if not launch or line.startswith("[0] ")]
    return json.loads(lines[-1])


def measure_settings(
    contender: Contender, workload: str, settings: Settings, epochs: int | None = None, launch: Sequence[str] = ()
) -> float | str:
    """Return the seconds a step of the fastest epoch, or why there is no such number."""
    variables = {"KERAS_BACKEND": contender.backend} | contender.variables | ({EPOCHS: str(epochs)} if epochs else {})
    answer = run_script(contender.command, workload, settings, variables, launch)
    return answer if isinstance(answer, str) else min(answer)


def try_grid(workload: str, part: dict[str, Contender]) -> Outcomes:
    """Return the settings that each contender tried, and its fastest."""
    outcomes: Outcomes = {}
    for name, contender in part.items():
        choices = {setting: values[:1] if results.SMALL else values for setting, values in contender.grid.items()}
        tried = search_settings(choices, functools.partial(measure_settings, contender, workload, epochs=2))
        if name == BEST and DEFAULT in outcomes:
            tried = [(NOTHING, get_first_look(outcomes[DEFAULT])), *tried]
        outcomes[name] = {"grid": tried, "best": find_fastest(tried)}
        print(f"{workload}: {name}: " + "; ".join(f"{settings} {format_seconds(took)}" for settings, took in tried), flush=True)
    return outcomes


def compare_contenders(workload: str, part: dict[str, Contender], grid: Outcomes | None, rounds: int) -> Outcomes:
    """Return the outcome of each contender: the fastest of its settings, in turns where it is not slow."""
    outcomes = {name: one | {"rounds": []} for name, one in (grid or try_grid(workload, part)).items() if name in part}
    looks = {name: look for name, one in outcomes.items() if isinstance(look := get_first_look(one), float)}
    in_turns = choose_quick(looks, {name for name, contender in part.items() if contender.is_peer})
    is_default_best = BEST in in_turns and outcomes[BEST]["best"] == NOTHING
    in_turns = [name for name in in_turns if name != BEST or not is_default_best]
    for _ in range(rounds):
        for name in in_turns:
            if not list_failures(outcomes[name]):
                outcomes[name]["rounds"].append(measure_settings(part[name], workload, outcomes[name]["best"]))
    if is_default_best:
        outcomes[BEST]["rounds"] = outcomes[DEFAULT]["rounds"]
    for name, one in outcomes.items():
        first = [] if grid and one["rounds"] else [looks[name]] if name in looks else []  # of this run, or all that there is
        one["seconds"] = None if list_failures(one) else min([*one["rounds"], *first], default=None)
        one["is_peer"] = part[name].is_peer
    if workload in WORKLOADS:
        outcomes[FLOOR] = {"seconds": run_script(("floor.py",), workload, {}, {}), "is_peer": False}
    return outcomes


def get_first_look(one: Outcomes) -> float | None:
    """Return the seconds of the fastest settings of a first look; None where all failed."""
    return min((took for _, took in one["grid"] if isinstance(took, float)), default=None)


def choose_quick(looks: Mapping[str, float], peers: set[str]) -> list[str]:
    """Return the contenders that take turns: all that are not slow, and Unisono without settings.

    >>> choose_quick({"theirs": 3.0, "slow": 7.0, "limit": 1.0, DEFAULT: 9.0}, {"theirs", "slow"})
    ['theirs', 'limit', 'Unisono, default']
    """
    most = SLOW * min((looks[name] for name in peers & looks.keys()), default=float("inf"))
    return [name for name, took in looks.items() if took <= most or name == DEFAULT]


def list_failures(one: Outcomes) -> list[str]:
    """Return the reasons of failures in the rounds. A contender that failed is not run again."""
    return [took for took in one["rounds"] if isinstance(took, str)]


def format_seconds(took: float | str) -> str:
    return took if isinstance(took, str) else f"{1e3 * took:.3g} ms"


def make_row(workload: str, outcomes: Outcomes) -> results.Row:
    """Return the milliseconds a step, in brackets where they are of one look, and the ratios: how many times as fast as."""
    seconds = {name: one["seconds"] for name, one in outcomes.items() if isinstance(one["seconds"], float)}
    peers = [seconds[name] for name, one in outcomes.items() if one["is_peer"] and name in seconds]
    ratios = {
        "default to the best peer": (min(peers, default=None), seconds.get(DEFAULT)),
        "default to Keras on JAX": (seconds.get(KERAS), seconds.get(DEFAULT)),
        "best to JAX by hand": (seconds.get(LIMIT), seconds.get(BEST)),
    }
    return (
        {"workload": workload}
        | {f"{name}, ms": format_outcome(one) for name, one in outcomes.items()}
        | {name: theirs / ours for name, (theirs, ours) in ratios.items() if theirs and ours}
    )


def format_outcome(one: Outcomes) -> float | str:
    if not isinstance(one["seconds"], float):
        return "failed"
    milliseconds = 1e3 * one["seconds"]
    return milliseconds if one.get("rounds", True) else f"({results.format_value(milliseconds)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1 if results.SMALL else 2)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS | MORE), metavar="NAME")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--contenders", nargs="+", metavar="NAME")
    parser.add_argument("--grid", type=pathlib.Path)
    given = parser.parse_args()
    known = json.loads(given.grid.read_text()) if given.grid else {}
    outcomes: dict[str, Outcomes] = results.read_kept("peers") or {}
    for workload in given.workloads:
        if given.missing and workload in outcomes:
            continue
        everybody = list_contenders(os.cpu_count() or 1, is_image=workload.startswith(("W1", "W2", "W6", "W7")))
        part = {name: everybody[name] for name in given.contenders or everybody}
        with tempfile.TemporaryDirectory() as programs:  # compiled once: compiling is not what is timed
            os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
            outcomes[workload] = compare_contenders(workload, part, known.get(workload), given.rounds)
        results.keep_rows("peers", {name: outcomes[name] for name in WORKLOADS | MORE if name in outcomes})
    print(results.format_table([make_row(workload, outcomes[workload]) for workload in given.workloads if workload in outcomes]))


if __name__ == "__main__":
    main()
