"""What Python does for a step stays below a limit, on one device and on several. No load of the machine changes a count."""

from __future__ import annotations

import json

import pytest

from kept_programs import NOTHING_KEPT
from processes import HERE, python

pytestmark = pytest.mark.processes
SCRIPT = HERE.parents[1] / "benchmarks" / "calls.py"
LIMIT = ", at most"


def test_a_step_has_few_python_calls_transfers_and_executables():
    done = python(str(SCRIPT), "--json", **NOTHING_KEPT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [(row["step of"], row["devices"]) for row in rows] == [("fit", 1), ("fit", 8), ("loop", 1), ("loop", 8)]
    assert all(row["Python calls"] > 10 for row in rows), rows
    assert all(row["executables"] and row["transfers"] for row in rows[2:]), rows
    above = [
        f"a step of {row['step of']} on {row['devices']} device(s): {row[name]:g} {name}, at most {row[name + LIMIT]} are allowed"
        for row in rows
        for name in [head.removesuffix(LIMIT) for head in row if head.endswith(LIMIT)]
        if row[name] > row[name + LIMIT]
    ]
    assert not above, "\n".join(above)
