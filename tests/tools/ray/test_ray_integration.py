"""Real trainings on Ray: a second worker, kills, nodes that come and go, rows of ray.data; one fingerprint. `make ray` installs Ray."""

import importlib.util
import json
import os
import pathlib
import random
import re
import subprocess

import pytest

from marked_processes import MARK, end_marked
from processes import FULL, HERE, user_python

pytestmark = [
    *[pytest.mark.packages, pytest.mark.processes, pytest.mark.slow, pytest.mark.thorough],
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: make ray installs it"),
]
ROOT = pathlib.Path(__file__).parents[3]
QUICK = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10", "JAX_PLATFORMS": "cpu"}
"""Ray takes a report each two seconds otherwise, and waits a minute for a node that is lost."""
ALL_PROGRAMS = {"JAX_COMPILATION_CACHE_DIR": "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
"""Workers keep programs where the trainer says, also those that are compiled quickly."""
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray listens at the address of the machine otherwise."""
EVENTS = int(os.environ.get("UNISONO_EVENTS", 20 if FULL else 2))
"""Kills and resizes."""
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.fixture
def run_on_ray(tmp_path):
    """Runs a script that starts a Ray of its own, and has none of its processes left in the end."""

    def run(script: pathlib.Path, *args: str, timeout: float) -> subprocess.CompletedProcess[str]:
        try:
            done = user_python(
                str(script), *args, timeout=timeout, **QUICK, **ON_LOOPBACK, **ALL_PROGRAMS, **{MARK: str(tmp_path)}
            )
        finally:
            left = end_marked(str(tmp_path))
        assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-5000:])
        assert not left
        return done

    return run


def test_one_and_two_workers_and_a_killed_one_have_the_bits_of_a_process_without_ray(run_on_ray, tmp_path):
    done = run_on_ray(HERE / "train_on_ray.py", str(tmp_path), timeout=300)
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(set(result["fingerprints"])) == 1
    assert result["killed"]
    folders, counts = zip(*result["programs"], strict=True)
    assert int(counts[1]) > 0  # those of the first start
    assert [folder for folder in folders if pathlib.Path(folder).exists()] == []
    assert result["GPUs"] == ["0", "1"]
    assert result["metrics"] == {"epoch": 2, "step": 0}
    assert result["storage"].startswith("py::fsspec")
    assert result["files"] == ["arrays.npz", "record.json"]


def test_what_goes_wrong_on_ray_is_said_and_nothing_is_lost(run_on_ray, tmp_path):
    """The first worker, which the others connect to, is lost, and the next run goes on from the checkpoint."""
    done = run_on_ray(HERE / "fail_on_ray.py", str(tmp_path), timeout=400)
    result = json.loads(done.stdout.splitlines()[-1])
    texts = {
        "no folder": r"un\.ray\.Trainer cannot write to RunConfig\(name='nowhere', storage_path='.*/file/runs'\): .*Not a directory.* Nothing was "
        r"started\. Write storage_path= with a folder or an address to which all nodes may write",
        "fewer replicas": r"received replicas=1 in 2 processes, .* Write replicas=2 or more, or start fewer processes\.",
        "lost coordinator": r"The run has lost worker 0 .*without an error of Python, .*FailureConfig\(max_failures=0\) is how often Ray "
        r"starts the workers again: write max_failures=3, .* What was saved is in RunConfig\(name='lost', .* goes on from the last checkpoint\.",
        "taken away": r"The checkpoint \w+.* was not written to .*taken away\. It lies in .* on this machine, .* Write RunConfig\(storage_path=",
    }
    for what, text in texts.items():
        assert re.search(text, result["said"][what], re.DOTALL), result["said"][what]
    waited, came = done.stderr.partition("a node comes")[::2]
    assert "ScalingConfig asks for 2 of them, each with {'CPU': 1}; the nodes of this cluster have room for 1," in waited
    assert "no workers run" not in came
    assert len(set(result["fingerprints"])) == 1


def test_the_example_gets_a_node_and_loses_a_worker_and_no_bit(run_on_ray, tmp_path):
    pytest.importorskip("sklearn")
    done = run_on_ray(ROOT / "examples/ray_fit.py", "--folder", str(tmp_path), timeout=400)
    starts = re.findall(r"workers: (\d), epoch (\d), from step (\d+) on", done.stdout)
    workers = [int(count) for count, *_ in starts]
    assert workers == sorted(workers)
    assert set(workers) == {1, 2}
    assert next(epoch for count, epoch, _ in starts if count == "2") == "2"  # in the middle of it: an epoch has 29 steps
    assert "worker 1 is killed behind step 50" in done.stdout
    on_ray, alone = re.findall(r"fingerprint ([0-9a-f]{32})", done.stdout)
    assert on_ray == alone


@pytest.mark.soak
def test_workers_killed_and_nodes_that_come_and_go_at_random_moments(run_on_ray, tmp_path):
    """UNISONO_SEED, which is printed where this fails, draws the same events and moments again; UNISONO_EVENTS says how many."""
    seed = os.environ.get("UNISONO_SEED", str(random.randrange(10**9)))
    print(f"UNISONO_SEED={seed}")
    done = run_on_ray(HERE / "soak_on_ray.py", str(tmp_path), seed, str(EVENTS), timeout=300 + 90 * EVENTS)
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.stdout.count("event: ") == EVENTS
    assert set(result["fingerprints"]) == {result["alone"]}, done.stdout
    assert set(result["addresses"]) <= LOOPBACK


def test_the_time_of_a_restart_and_of_a_resize_is_measured(run_on_ray):
    done = run_on_ray(ROOT / "benchmarks/recovery.py", "1", "--ray", timeout=400)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[0] == ["on Ray", *(f"{moment}, s" for moment in ("process", "function", "connected", "restored", "next step"))]
    for row in rows[2:]:
        seconds = [float(cell) for cell in row[1:]]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
    assert len(rows) == 4
