"""The planted faults part where their index says, in fresh processes, and their twins do not."""

from __future__ import annotations

import concurrent.futures
import difflib
import json
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from audit.faults.index import FAULTS, FOLDER, MARK, Cause, Kind, PlantedFault
from processes import LAUNCH, environment
from sizes import thorough

WATCHED = FOLDER / "watched_run.py"
LIMIT = 300.0
ONE_DEVICE = {"UNISONO_DEVICES": "1"}
NEAR = 1e-5
"""Above what the order of sums changes in a weight within these few steps."""


class Run(NamedTuple):
    """One run of a pair."""

    variables: dict[str, str]
    """What the environment says of the placement."""
    processes: int = 1


PAIRS = {
    Kind.REPEAT: (Run({"PYTHONHASHSEED": "1"}), Run({"PYTHONHASHSEED": "2"})),
    Kind.DEVICES: (Run(ONE_DEVICE), Run({"UNISONO_DEVICES": "2"})),
    Kind.PROCESSES: (Run(ONE_DEVICE), Run(ONE_DEVICE, processes=2)),
    Kind.REPLICAS: (Run(ONE_DEVICE | {"UNISONO_REPLICAS": "1"}), Run(ONE_DEVICE)),
}


class Outcome(NamedTuple):
    code: int
    records: list[dict[str, Any]]
    """What each process has written; empty where it failed."""
    errors: str


def run_script(script: pathlib.Path, run: Run, folder: pathlib.Path) -> Outcome:
    """Run a script on a placement, and return what its processes have written."""
    temporary = folder / script.stem  # the two runs have it in common, as runs of a user have
    temporary.mkdir(exist_ok=True)
    records = folder / f"{script.stem}-{'-'.join(run.variables.values())}-{run.processes}"
    records.mkdir()
    command = [str(WATCHED), str(script), str(records)]
    start = [*LAUNCH, "--processes", str(run.processes), "--cpu"] if run.processes > 1 else [sys.executable]
    variables = environment(**{"PYTHONHASHSEED": "1", "JAX_PLATFORMS": "cpu", "TMPDIR": str(temporary)} | run.variables)
    done = subprocess.run([*start, *command], env=variables, capture_output=True, text=True, timeout=LIMIT, check=False)
    written = [json.loads(file.read_text()) for file in sorted(records.iterdir())]
    return Outcome(done.returncode, written, done.stderr)


def run_pair(script: pathlib.Path, kind: Kind, folder: pathlib.Path) -> list[Outcome]:
    return [run_script(script, run, folder) for run in PAIRS[kind]]


def find_first_difference(outcomes: list[Outcome]) -> int | None:
    """Return the first step after which a process has other bits than the first run; None where all have the same."""
    reference, *others = [record["steps"] for outcome in outcomes for record in outcome.records]
    firsts = []
    for steps in others:
        pairs = enumerate(zip(reference, steps, strict=False))
        firsts.append(
            next((step for step, (one, other) in pairs if one != other), None if len(steps) == len(reference) else len(steps))
        )
    return min((first for first in firsts if first is not None), default=None)


def measure_distance(outcomes: list[Outcome]) -> float:
    """Return how far the weights of two runs are apart, at most."""
    one, other = (outcome.records[0]["weights"] for outcome in outcomes)
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


def check_fault(fault: PlantedFault, outcomes: list[Outcome]) -> None:
    """Check that the runs of a fault part as the index says."""
    said = "".join(outcome.errors for outcome in outcomes)
    if fault.warning is not None:
        assert fault.warning in said
    if fault.error is not None:
        assert [bool(outcome.code) for outcome in outcomes] == [False, True]
        assert fault.error in outcomes[1].errors
        return
    assert not any(outcome.code for outcome in outcomes), said[-3000:]
    if fault.kind is Kind.REPLICAS:
        assert measure_distance(outcomes) > 10 * NEAR
    else:
        assert find_first_difference(outcomes) == fault.first_step
    if fault.layer is not None:
        assert fault.layer.split("/")[0] in outcomes[0].records[0]["layers"]


def check_twin(kind: Kind, outcomes: list[Outcome]) -> None:
    """Check that the runs of a twin do not part, and that nothing is warned of."""
    said = "".join(outcome.errors for outcome in outcomes)
    assert not any(outcome.code for outcome in outcomes), said[-3000:]
    assert "Warning" not in said, said
    if kind is Kind.REPLICAS:
        assert measure_distance(outcomes) < NEAR
    else:
        assert find_first_difference(outcomes) is None


def name_fault(fault: PlantedFault) -> str:
    return fault.fault_path.stem


@pytest.mark.processes
@pytest.mark.parametrize("fault", thorough(*FAULTS), ids=name_fault)
def test_the_fault_parts_and_its_twin_does_not(fault, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        pairs = [pool.submit(run_pair, script, fault.kind, tmp_path) for script in (fault.fault_path, fault.twin_path)]
        of_fault, of_twin = (pair.result() for pair in pairs)
    check_fault(fault, of_fault)
    check_twin(fault.kind, of_twin)


def test_there_are_thirty_faults_and_each_cause_and_kind_has_one():
    assert len({fault.number for fault in FAULTS}) == len(FAULTS) >= 30
    assert {fault.cause for fault in FAULTS} == set(Cause)
    assert {fault.kind for fault in FAULTS} == set(Kind)
    assert {path for fault in FAULTS for path in (fault.fault_path, fault.twin_path)} == set(FOLDER.glob("train_*.py"))


@pytest.mark.parametrize("fault", FAULTS, ids=name_fault)
def test_a_fault_has_one_mark_and_is_near_its_twin(fault):
    assert MARK not in fault.twin_path.read_text()
    lines = fault.fault_path.read_text().splitlines()
    assert lines[fault.line - 1].endswith(MARK)
    twin = fault.twin_path.read_text().splitlines()
    assert difflib.SequenceMatcher(None, lines, twin, autojunk=False).ratio() > 0.75
    assert 20 < len(lines) < 75


def test_a_difference_is_found_at_its_step():
    def outcome(*steps: str) -> Outcome:
        return Outcome(0, [{"steps": list(steps)}], "")

    assert find_first_difference([outcome("a", "b", "c"), outcome("a", "b", "c")]) is None
    assert find_first_difference([outcome("a", "b", "c"), outcome("a", "x", "c")]) == 1
    assert find_first_difference([outcome("a", "b", "c"), outcome("a", "b")]) == 2
    assert find_first_difference([outcome("a", "b"), outcome("a", "b"), outcome("x", "b")]) == 0
