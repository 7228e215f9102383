"""kill -9 at random moments, in steps and in saves: the run that was resumed every time ends with the bits of one that was left alone."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from processes import HERE, LIMIT, environment
from sizes import cases, thorough
from unisono._src.keras.checkpoint.local_storage import UNFINISHED

pytestmark = pytest.mark.processes

KILLS = 30 if os.environ.get("UNISONO_SOAK") == "full" else cases(1, 3)
SCRIPT = str(HERE / "train_and_be_killed.py")


REPLICAS, EPOCHS = cases((5, 2), (8, 3))
"""Five replicas have two rows each in every batch, which is one program."""
PLACEMENTS = cases([0, 1, 2, 3, 5], [0, 1, 2, 3, 4, 8])
"""The numbers of devices of the replicas; 0 for OneDeviceStrategy."""


def started(directory: Path, devices: int, how: str, **options: str) -> subprocess.Popen[str]:
    """Those that are started again load what the first has compiled, so that more of the moments lie in steps and saves."""
    spec = {"directory": str(directory), "devices": devices, "how": how, "replicas": REPLICAS, "epochs": EPOCHS, **options}
    command = [sys.executable, SCRIPT, json.dumps(spec)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def killed(process: subprocess.Popen[str], directory: Path, moment: random.Random, in_save: bool) -> bool:
    """Whether the process was still there to be killed."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1][-3000:]
    if in_save:
        while process.poll() is None and not list(directory.glob(f"*{UNFINISHED}")):
            time.sleep(0.0005)
    else:
        time.sleep(moment.uniform(0.2, 2.5))
    alive = process.poll() is None
    process.kill()
    return alive


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    with process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.soak
@pytest.mark.parametrize("how", ["fit", *thorough("loop")])
def test_killed_at_random_moments(tmp_path, how):
    """UNISONO_SEED, which is printed where this fails, draws the same placements and moments again."""
    seed = os.environ.get("UNISONO_SEED", str(random.randrange(10**9)))
    print(f"UNISONO_SEED={seed}")
    moment, left, runs = random.Random(seed), KILLS, 0
    wanted: dict[str, Any] = {}
    while left:
        runs += 1
        directory = tmp_path / f"run{runs}"
        alive = True
        while left and alive:
            with started(directory, moment.choice(PLACEMENTS), how) as process:
                alive = killed(process, directory, moment, in_save=bool(left % 2))
                process.communicate()
            left -= alive
        options = (
            {} if wanted else {"alone": str(tmp_path / "alone")}
        )  # by the process that is there: another takes its time to start
        last = result(started(directory, moment.choice(PLACEMENTS), how, **options))
        if not wanted:
            wanted = last["alone"]
            assert wanted["steps"] == 23 * EPOCHS
            assert wanted["miscounted"] == [0.0] * EPOCHS
        assert (last["bits"], last["steps"]) == (wanted["bits"], wanted["steps"])
        assert set(last["miscounted"]) == {0.0}, "rows were lost, or seen twice"
