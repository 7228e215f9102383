"""Long runs: nothing starves, nothing drifts, nothing depends on the process. `make soak` runs them in full."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from processes import HERE, python, train

FULL = os.environ.get("UNISONO_SOAK") == "full"
STEPS = 20_000 if FULL else 200
PROCESSES = 20 if FULL else 2
FAMILIES_OF_MANY = ["conv", "attention", "lstm"] if FULL else ["conv"]


@contextlib.contextmanager
def both_cores_loaded() -> Iterator[None]:
    """Two processes that do nothing but take time."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def long_run(devices: int, rows: int) -> list[str]:
    done = python(str(HERE / "train_long.py"), str(devices), str(STEPS), str(rows))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "rows"), [(8, 24), (2, 24), (8, 20)], ids=["8 devices", "2 devices", "8 devices, several calls"]
)
def test_devices_on_loaded_cores_do_not_starve_each_other(devices, rows):
    """XLA's collectives between CPU devices of one process deadlock after some thousand steps. Neither a kernel where they meet does, nor copies."""
    with both_cores_loaded():
        steps, fingerprint = long_run(devices, rows)
    assert int(steps) == STEPS
    assert [steps, fingerprint] == long_run(1, rows)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("cores", ["free", "loaded"])
def test_the_same_training_in_many_processes_has_one_fingerprint(cores):
    """Every process compiles afresh: no compilation cache."""
    with both_cores_loaded() if cores == "loaded" else contextlib.nullcontext():
        results = [train(2, 8, FAMILIES_OF_MANY, epochs=1) for _ in range(PROCESSES)]
    assert len({str(result) for result in results}) == 1
