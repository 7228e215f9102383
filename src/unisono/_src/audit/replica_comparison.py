"""R = 1 beside R = n: whether the weights are near each other, which layers make R matter, and which rows each replica saw."""

from __future__ import annotations

import ast
import itertools
import pathlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from unisono._src.audit.audit_report import Coupling, ReplicaComparison, ReplicaRows
from unisono._src.audit.cause import Cause
from unisono._src.audit.coupling import list_couplings, make_coupling
from unisono._src.audit.run_plan import RunPlan
from unisono._src.audit.script_run import FinishedRun, ScriptRunner, find_last_lines
from unisono._src.audit.script_trace.line_trace import HANDED
from unisono._src.audit.source_code import read_source
from unisono._src.audit.trace_comparison import Place, ProcessTrace, TraceComparison, read_trace

TOLERANCE = 1e-5
"""Of the distance of the weights, relative to their size. Rounding in other orders changes less in some dozens of steps."""


def compare_replicas(
    runner: ScriptRunner, replicas: int, warnings: tuple[str, ...], say: Callable[[str], None]
) -> ReplicaComparison:
    """Run the script with R = 1 and with its own R on one device, and return how they differ."""
    runs: list[FinishedRun] = []
    for count in (1, replicas):
        plan = RunPlan(f"R = {count}, 1 device", 1, replicas=count)
        say(plan.name)
        runs.append(runner.run_to_end(plan, f"replicas-{count}", is_traced=True))
    for run in runs:
        if run.exit_code:
            words = f"{run.plan.name}: the script ended with exit code {run.exit_code}. {find_last_lines(run.output)}"
            return ReplicaComparison(replicas, TOLERANCE, float("inf"), False, (), (words, *warnings), ())
    whole, cut = (read_trace(run.directory / "trace-0.json") for run in runs)
    distance = measure_distance(runs[0].directory, runs[1].directory)
    is_near = distance <= TOLERANCE
    rows = count_rows(whole, cut, replicas)
    couplings: tuple[Coupling, ...] = ()
    if not is_near:
        of_rows = find_row_coupling(whole, cut) if any(each.duplicates or each.missing for each in rows) else ()
        couplings = of_rows or list_couplings(cut, whole)
    return ReplicaComparison(replicas, TOLERANCE, distance, is_near, couplings, warnings, rows)


def measure_distance(one: pathlib.Path, other: pathlib.Path) -> float:
    """Return the distance of the weights that two runs have left, relative to their size."""
    files = [folder / "weights-0.npz" for folder in (one, other)]
    if not all(file.exists() for file in files):
        return float("inf")
    ones, others = (np.load(file) for file in files)
    if [ones[name].shape for name in ones.files] != [others[name].shape for name in others.files]:
        return float("inf")
    pairs = [
        (ones[mine].astype(np.float64), others[its].astype(np.float64))
        for mine, its in zip(ones.files, others.files, strict=True)
    ]
    apart = sum(float(np.sum((mine - its) ** 2)) for mine, its in pairs)
    size = sum(float(np.sum(mine**2)) for mine, _ in pairs)
    return float(np.sqrt(apart / max(size, np.finfo(np.float64).tiny)))


def count_rows(whole: ProcessTrace, cut: ProcessTrace, replicas: int) -> tuple[ReplicaRows, ...]:
    """Return what each replica saw in the steps that both runs took."""
    totals = [ReplicaRows(replica, 0, 0, 0) for replica in range(replicas)]
    for expected, shards in zip(whole.content["rows"], cut.content["rows"], strict=False):
        counted = count_step_rows([row for shard in expected for row in shard], shards)
        totals = [add_counts(total, count) for total, count in zip(totals, counted, strict=True)]
    return tuple(totals)


def count_step_rows(expected: Sequence[str], shards: Sequence[Sequence[str]]) -> list[ReplicaRows]:
    """Return what each replica saw in a step, beside the rows that R = 1 saw.

    A row is missing where R = 1 has it among the rows in this replica's place. The last replica's place goes to the end.
    """
    unseen = Counter(expected)
    fresh = [take_rows(unseen, shard) for shard in shards]
    bounds = [*itertools.accumulate(map(len, shards[:-1]), initial=0), len(expected)]
    missing = [take_rows(unseen, expected[start:end]) for start, end in itertools.pairwise(bounds)]
    return [
        ReplicaRows(replica, len(shard), len(shard) - fresh[replica], missing[replica]) for replica, shard in enumerate(shards)
    ]


def take_rows(rows_left: Counter[str], rows: Sequence[str]) -> int:
    """Take rows out of those that are left, and return how many of them were there."""
    before = rows_left.total()
    rows_left -= Counter(rows)
    return before - rows_left.total()


def add_counts(one: ReplicaRows, other: ReplicaRows) -> ReplicaRows:
    return ReplicaRows(one.replica, one.rows + other.rows, one.duplicates + other.duplicates, one.missing + other.missing)


def find_row_coupling(whole: ProcessTrace, cut: ProcessTrace) -> tuple[Coupling, ...]:
    """Return the line that cuts the rows of a replica."""
    comparison = TraceComparison(whole, cut)
    for place in comparison.list_differing_places():
        if HANDED in comparison.list_differing_names(place):
            function = read_source(place.file).find_enclosing_function(place.line)
            if function is not None:
                line = find_cut(place.file, function)
                return (make_coupling(None, Cause.ROWS, Place(place.file, line or place.line, place.function)),)
    return (make_coupling(None, Cause.ROWS, None),)


def find_cut(file: str, function: ast.AST) -> int | None:
    """Return the line that computes where the rows of a replica begin: the last one that a slice in the function reads."""
    slices = [node for node in ast.walk(function) if isinstance(node, ast.Slice)]
    names = {node.id for each in slices for node in ast.walk(each) if isinstance(node, ast.Name)}
    assigned = [
        node.lineno
        for node in read_source(file).iterate_statements(function)
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
    ]
    return max(assigned, default=None)
