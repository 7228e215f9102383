"""Processes of one device each verify each other: no bit is another by it, and a process that computes wrong bits is found and named.

Devices of a process verify each other, and what is found there holds for all processes.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from processes import HERE, LAUNCH, environment
from sizes import cases, thorough
from unisono._src.tools.records import read_run_record

pytestmark = pytest.mark.processes
STEPS, FOUND = cases(5, 260), cases(2, 100)
"""A fault strikes where the process at fault has a part in the step, and a step that is not made has the same processes again."""


def run_processes(
    count: int,
    faults: list[dict[str, Any] | None],
    verify: float | None = 1,
    training: str = "whole",
    devices: int = 1,
    **variables: str,
) -> list[list[dict[str, Any]]]:
    """Return what each process tells of the start and of each step."""
    spec = json.dumps({"verify": verify, "training": training, "faults": faults, "devices": devices})
    start = [*LAUNCH, "--processes", str(count), "--cpu"] if count > 1 else [sys.executable]
    command = [*start, str(HERE / "verify_in_processes.py"), spec]
    done = subprocess.run(
        command,
        env=environment(JAX_NUM_CPU_DEVICES=str(devices), **variables),
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.findall(r"^(?:\[(\d)\] )?(\[\{.*\}\])$", done.stdout, re.MULTILINE)
    return [json.loads(words) for _, words in sorted(told)]


@pytest.fixture(scope="module")
def sound():
    """The fingerprints of the training in one process, from its start on."""
    (told,) = run_processes(1, [None] * STEPS, None)
    return [words["print"] for words in told]


def name_process(number: int) -> str:
    return rf"Device \d+ \(cpu:\d+\) of process {number}"


@pytest.mark.parametrize("processes", [3, *thorough(2)])
def test_each_flipped_bit_is_found_and_attributed(sound, processes):
    """With two processes a fault that repeats is found, and not attributed: each stands by its own bits."""
    victims = itertools.cycle(range(processes))
    faults = [{"victim": next(victims), "always": step % 4 == 3, "seed": step} if step % 5 else None for step in range(STEPS)]
    told = run_processes(processes, faults)
    assert len(told) == processes
    made = found = 0
    for fault, words in zip(faults, [*zip(*told, strict=True)][1:], strict=True):
        error, print_ = words[0]["error"], words[0]["print"]
        assert all(each["error"] == error and each["print"] == print_ for each in words[1:])
        assert bool(error) == any(each["flips"] for each in words)
        made += error is None or "The step was finished" in error
        assert print_ == sound[made]
        if error is None:
            continue
        found += 1
        if fault["always"] and processes == 2:
            assert "more runs do not tell which of them is at fault" in error
            assert "The step was not made" in error
            continue
        assert re.match(
            rf"{name_process(fault['victim'])} is at fault: it computed the contribution of replica \d to step \d+ with", error
        )
        assert ("It computes wrong bits again" in error) == fault["always"] == ("The step was not made" in error)
        assert f" to step {made - ('not made' not in error)} with " in error
    assert found >= FOUND


@pytest.mark.slow
@pytest.mark.thorough
def test_no_bit_is_another_where_nothing_is_at_fault(sound):
    """The words of a step are as many in those that are not verified."""
    for told in run_processes(2, [None] * 4, 0.4):
        assert [words["print"] for words in told] == sound[:5]
        assert [words["error"] for words in told[1:]] == [None] * 4


@pytest.mark.parametrize("training", thorough("looped", "few rows", "weighted"))
def test_other_trainings_are_verified(tmp_path, training):
    """Recording goes on beside it: a step that is computed once more is recorded once."""
    steps = 6
    (alone,) = run_processes(1, [None] * steps, None, training)
    faults = [{"victim": step % 3, "always": False, "seed": step} if step % 2 else None for step in range(steps)]
    folder = tmp_path / "run"
    told = run_processes(3, faults, 1, training, UNISONO_RECORD=str(folder))
    for words in told:
        assert [each["print"] for each in words] == [each["print"] for each in alone]
    assert len(read_run_record(folder).steps) == steps
    flipped = [any(each["flips"] for each in words) for words in list(zip(*told, strict=True))[1:]]
    assert any(flipped)
    for fault, is_flipped, words in zip(faults, flipped, list(zip(*told, strict=True))[1:], strict=True):
        for each in words:
            assert bool(each["error"]) == is_flipped
            assert not is_flipped or re.match(rf"{name_process(fault['victim'])} is at fault", each["error"])


@pytest.mark.parametrize("devices", [2, *thorough(3)])
def test_devices_of_processes_are_verified(sound, devices):
    """A step that one process does not make, since a fault repeats there, is made by no process: they have the same state after each step."""
    faults = [
        {"victim": step % 2, "device": step // 2 % devices, "always": step % 4 == 3, "seed": step} if step % 5 else None
        for step in range(STEPS)
    ]
    told = run_processes(2, faults, devices=devices)
    made = found = 0
    for fault, words in zip(faults, [*zip(*told, strict=True)][1:], strict=True):
        flipped = [bool(each["flips"]) for each in words]
        errors = [each["error"] for each in words]
        is_made = not (any(flipped) and fault["always"])
        made += is_made
        found += any(flipped)
        assert [each["print"] for each in words] == [sound[made]] * 2
        for error, is_here in zip(errors, flipped, strict=True):
            if not is_here and is_made:
                assert error is None
            elif not is_here:
                assert error.startswith(f"A device of process {flipped.index(True)} is at fault, and computes wrong bits again")
            elif devices == 2 and fault["always"]:
                assert "more runs do not tell which of them is at fault" in error
            else:
                assert re.match(rf"{name_process(fault['victim'])} is at fault", error)
            assert error is None or ("The step was not made" in error) != is_made
    assert found >= FOUND
