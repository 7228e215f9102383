"""Where a step's time goes: the operations of the compiled step, by how long they run, with the rate of products and convolutions.

python benchmarks/operations.py WORKLOAD [--strategy '{"devices": 2, "replicas": 8}'] [--top N]

JAX's profiler says when each operation ran, XLA's dump of the program what it was. A native kernel is named, with the shapes of its
operands. Operations run beside one another, so that their sum may be more than the step; the profiler makes the step slower. A rate near
that of a product of large matrices (`floor.py`) leaves nothing to be had.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import results

TITLE = re.compile(r"^(?:ENTRY )?%?([\w.-]+) [({].*\{$")
LINE = re.compile(r"(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<kind>[\w-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)")
RUNS_OTHERS = ("while", "call", "conditional")
SIZES = re.compile(r"^\w+\[([\d,]*)\]")


class Operation(NamedTuple):
    """A line of a program."""

    kind: str
    shape: tuple[int, ...]
    operands: tuple[str, ...]
    rest: str


Computations = dict[str, dict[str, Operation]]


def parse_program(program: str) -> Computations:
    """Return the operations of each computation, by name."""
    computations: Computations = {}
    now: dict[str, Operation] = {}
    for line in program.splitlines():
        if title := TITLE.match(line):
            now = computations.setdefault(title[1], {})
        elif match := LINE.match(line.strip()):
            sizes = SIZES.match(match["type"])
            shape = tuple(int(size) for size in sizes[1].split(",") if size) if sizes else ()
            operands = tuple(re.findall(r"%([\w.-]+)", match["operands"]))
            now[match["name"]] = Operation(match["kind"], shape, operands, match["rest"])
    return computations


def count_arithmetic(operation: Operation, beside: dict[str, Operation]) -> tuple[float, str] | None:
    """Return the number of operations of a product or a convolution, and its shapes in words; None for other operations."""
    if operation.kind not in ("dot", "convolution"):
        return None
    left, right = (beside[name].shape for name in operation.operands[:2])
    said = f"{operation.kind} {list(left)} x {list(right)} -> {list(operation.shape)}"
    if operation.kind == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.rest)
        length = math.prod(left[int(axis)] for axis in contracted[1].split(",") if axis) if contracted else 1
    else:
        labels = re.search(r"dim_labels=\w+_(\w+)->", operation.rest)
        length = math.prod(right) // (right[labels[1].index("o")] if labels else 1)
    return 2.0 * math.prod(operation.shape) * length, said


def explain_operation(name: str, computations: Computations) -> tuple[str, float, str]:
    """Return kind, number of operations and description of an operation that ran. One that runs others has no kind."""
    for within in computations.values():
        if (operation := within.get(name)) and operation.kind not in RUNS_OTHERS:
            called = re.search(r"calls=%?([\w.-]+)", operation.rest)
            inside = computations[called[1]] if called else within
            if target := re.search(r'custom_call_target="([^"]+)"', operation.rest):
                shapes = [list(within[operand].shape) for operand in operation.operands if operand in within]
                return "kernel", 0.0, f"{target[1]}: {', '.join(map(str, shapes))}"
            for one in inside.values() if called else [operation]:
                if product := count_arithmetic(one, inside):
                    return ("product" if one.kind == "dot" else one.kind), *product
            kinds = ", ".join(one.kind for one in inside.values() if one.kind != "parameter") if called else operation.kind
            return "other", 0.0, f"{list(operation.shape)}: {kinds[-90:]}"
    return "", 0.0, ""


def read_profile(folder: Path) -> tuple[dict[str, float], collections.Counter[str]]:
    """Return the seconds of each name in the profile, and how many times it ran."""
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    seconds: dict[str, float] = collections.defaultdict(float)
    times: collections.Counter[str] = collections.Counter()
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if event.get("ph") == "X":
            seconds[event["name"]] += event["dur"] / 1e6
            times[event["name"]] += 1
    return seconds, times


def profile_epoch(workload: Any, strategy: dict[str, Any], folder: Path) -> float:
    """Return the seconds a step of a third epoch, and write the profile."""
    import jax
    import keras

    import unisono as un

    with un.MirroredStrategy(**strategy).scope():
        model, optimizer = workload.model(keras)
    model.compile(optimizer, workload.loss(keras), metrics=["accuracy"])
    x, y = workload.data()
    model.fit(x, y, batch_size=workload.batch, epochs=2, verbose=0)
    with jax.profiler.trace(str(folder)):
        start = time.perf_counter()
        model.fit(x, y, batch_size=workload.batch, verbose=0)
        return (time.perf_counter() - start) / workload.steps


def list_rows(
    seconds: dict[str, float], times: collections.Counter[str], computations: Computations, steps: int
) -> Iterator[results.Row]:
    for name, took in sorted(seconds.items(), key=lambda one: -one[1]):
        kind, operations, what = explain_operation(name, computations)
        if kind:
            rate = operations * times[name] / took / 1e9 if operations else ""
            yield {"ms a step": 1e3 * took / steps, "times": times[name] / steps, "GF/s": rate, "kind": kind, "what": what}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--strategy", type=json.loads, default={})
    parser.add_argument("--top", type=int, default=30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dump = f"--xla_dump_to={folder / 'programs'} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*train.*"
        os.environ |= {"KERAS_BACKEND": "jax", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {dump}"}
        from workloads import MORE, WORKLOADS

        workload = (WORKLOADS | MORE)[given.workload]
        step = profile_epoch(workload, given.strategy, folder / "profile")
        programs = (folder / "programs").glob("*after_optimizations.txt")
        computations = parse_program(max((path.read_text() for path in programs), key=len))
        rows = list(list_rows(*read_profile(folder / "profile"), computations, workload.steps))
    kinds: collections.Counter[str] = collections.Counter()
    for row in rows:
        kinds[row["kind"]] += row["ms a step"]
    print(f"{given.workload} {json.dumps(given.strategy)}: {1e3 * step:.3g} ms a step under the profiler")
    print("; ".join(f"{kind} {took:.3g} ms" for kind, took in kinds.most_common()))
    results.report_rows("operations", rows[: given.top])


if __name__ == "__main__":
    main()
