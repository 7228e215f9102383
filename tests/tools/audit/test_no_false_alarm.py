"""An audit says of no example, and of no family of the matrix, that its runs differ: on other devices, and in two processes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from matrix import FAMILIES
from processes import environment
from sizes import thorough

HERE = pathlib.Path(__file__).parents[2]
EXAMPLES = HERE.parent / "examples"
NEEDS_GRAIN = ("image_classification.py",)
LIMIT = 900.0
STEPS = 12
"""More than an epoch of a family, so that batches of all sizes are compared."""


def assert_audit_is_silent(folder: pathlib.Path, *words: str, **variables: str) -> None:
    report = folder / "report.json"
    command = [sys.executable, "-m", "unisono", "audit", "--json", str(report), "--devices", "1,2", *words]
    done = subprocess.run(
        command,
        env=environment(JAX_PLATFORMS="cpu", **variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    runs = json.loads(report.read_text())["runs"]
    assert len(runs) >= 3
    assert len({run["digest"] for run in runs}) == 1, said
    assert min(run["steps"] for run in runs) > 0


@pytest.mark.processes
@pytest.mark.parametrize("name", thorough(*(path.name for path in sorted(EXAMPLES.glob("*.py")))))
def test_no_example_differs(tmp_path, name):
    if name in NEEDS_GRAIN:
        pytest.importorskip("grain")
    finds_all_modules = os.environ.get("PYTHONPATH", "")
    assert_audit_is_silent(tmp_path, "--steps", "4", str(EXAMPLES / name), PYTHONPATH=finds_all_modules)


@pytest.mark.processes
@pytest.mark.parametrize("family", thorough(*FAMILIES))
def test_no_family_differs(tmp_path, family):
    assert_audit_is_silent(tmp_path, "--steps", str(STEPS), "--processes", "2", str(HERE / "helpers" / "train_family.py"), family)
