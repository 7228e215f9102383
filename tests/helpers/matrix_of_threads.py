"""Random nets and single operations in fresh processes, on other numbers of devices and threads, and a table of what was equal.

python tests/helpers/matrix_of_threads.py [--nets 100] [--operations 200] [--seed 0] [--out FOLDER]

A net is trained with R = 4 and then predicts; an operation is computed with its gradients. Nothing that another process has compiled is
taken. Writes `threads.md`, the table, and exits with 1 where two differ or a process fails.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kept_programs import NOTHING_KEPT
from processes import FOR_USERS, HERE, python

AT_ONCE, IN_A_PROCESS, LIMIT = 2, 20, 3600.0


class Place(NamedTuple):
    """How a process is started; `threads` is None where it may use all cores."""

    devices: int = 1
    threads: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Linear algebra has a thread less: it has none beyond the cores."""
        threads = {} if self.threads is None else {"PJRT_NPROC": str(self.threads), "OPENBLAS_NUM_THREADS": str(self.threads - 1)}
        return NOTHING_KEPT | FOR_USERS | threads | {"JAX_PLATFORMS": "cpu"}

    def __str__(self) -> str:
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        return devices if self.threads is None else f"{devices}, {self.threads} threads"


FIRST = Place()
SENSITIVE = (25, 48)
"""Nets whose sums XLA contracts otherwise for two threads than for three, if programs are compiled for the threads of the process."""
PLACES = (*map(Place, (1, 2, 3, 4, 8)), *(Place(threads=threads) for threads in (2, 3, 4, 8, 16)))

Found = dict[str, str]
"""The fingerprints of nets by their numbers, or the digests of operations by what they are."""


def nets(place: Place, count: int, first: int = 0) -> Found:
    """Return the fingerprints of nets that were trained in a process of their own."""
    return printed(place, "train_nets.py", json.dumps({"devices": place.devices, "first": first, "count": count}))


def operations(place: Place, seed: int, count: int, first: int = 0) -> Found:
    """Return the digests of operations that were computed in a process of their own."""
    return printed(place, "digest_operations.py", str(seed), str(count), str(first), str(place.devices))


def nets_and_operations(place: Place, numbers: Sequence[int], operation_count: int, seed: int, seven: bool = False) -> Found:
    """Return nets by their numbers and the first operations, of one process; with `seven` a net too that YNNPACK would end the process over."""
    spec = {"devices": place.devices, "numbers": [*numbers], "operations": [seed, operation_count, 0], "seven": seven}
    return printed(place, "train_nets.py", json.dumps(spec))


def printed(place: Place, script: str, *words: str) -> Found:
    """Return what a script prints in a fresh process."""
    done = python(str(HERE / script), *words, timeout=LIMIT, **place.environment)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(words)} on {place}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def different(here: Found, there: Found) -> list[str]:
    """Return the names of those that are not the same."""
    return [name for name in here | there if here.get(name) != there.get(name)]


def table(found: Mapping[Place, tuple[Found, Found]]) -> str:
    """Return Markdown: for each place, how many have the bits of the first, of how many."""
    lines = ["| place | nets | operations |", "| --- | --- | --- |"]
    for place, both in found.items():
        pairs = zip(both, found[FIRST], strict=True)
        cells = [f"{len(first) - len(different(here, first))} of {len(first)}" for here, first in pairs]
        lines.append(f"| {place} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def all_at(place: Place, net_count: int, operation_count: int, seed: int) -> tuple[Found, Found]:
    """Return what a place gives, some at a time."""
    trained = [nets(place, count, first) for first, count in portions(net_count)]
    computed = [operations(place, seed, count, first) for first, count in portions(operation_count)]
    return {**collections.ChainMap(*trained)}, {**collections.ChainMap(*computed)}


def portions(count: int) -> list[tuple[int, int]]:
    """Return (the first, how many) of those that one process takes."""
    return [(first, min(IN_A_PROCESS, count - first)) for first in range(0, count, IN_A_PROCESS)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=int, default=100)
    parser.add_argument("--operations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    given = parser.parse_args(arguments)
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        results = pool.map(lambda place: all_at(place, given.nets, given.operations, given.seed), PLACES)
        found = {}
        for place, result in zip(PLACES, results, strict=True):
            found[place] = result
            print(f"{(time.monotonic() - start) / 60:5.1f} min {table(found).splitlines()[-1]}", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "threads.md").write_text(table(found))
    wrong = [
        (place, name)
        for place, both in found.items()
        for here, first in zip(both, found[FIRST], strict=True)
        for name in different(here, first)
    ]
    for place, name in wrong:
        print("different:", place, name)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
