"""Real trainings on Ray: a second worker, a kill, a node that comes, rows of ray.data; one fingerprint. `make ray` installs Ray."""

import importlib.util
import json
import pathlib
import re

import pytest

from processes import user_python

pytestmark = [
    *[pytest.mark.packages, pytest.mark.processes, pytest.mark.slow, pytest.mark.thorough],
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: make ray installs it"),
]
ROOT = pathlib.Path(__file__).parents[3]
QUICK = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3", "JAX_PLATFORMS": "cpu"}
"""Ray takes a report each two seconds otherwise."""


def test_one_and_two_workers_and_a_killed_one_have_the_bits_of_a_process_without_ray(tmp_path):
    done = user_python(str(ROOT / "tests/helpers/train_on_ray.py"), str(tmp_path), timeout=300, **QUICK)
    assert done.returncode == 0, done.stderr[-5000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(set(result["fingerprints"])) == 1
    assert result["killed"]
    assert result["GPUs"] == ["0", "1"]
    assert result["metrics"] == {"epoch": 2, "step": 0}
    assert result["storage"].startswith("py::fsspec")
    assert result["files"] == ["arrays.npz", "record.json"]


def test_the_example_gets_a_node_and_loses_a_worker_and_no_bit(tmp_path):
    pytest.importorskip("sklearn")
    done = user_python(str(ROOT / "examples/ray_fit.py"), "--folder", str(tmp_path), timeout=400, **QUICK)
    assert done.returncode == 0, done.stderr[-5000:]
    starts = re.findall(r"workers: (\d), epoch (\d), from step (\d+) on", done.stdout)
    workers = [int(count) for count, *_ in starts]
    assert workers == sorted(workers)
    assert set(workers) == {1, 2}
    assert next(epoch for count, epoch, _ in starts if count == "2") == "2"  # in the middle of it: an epoch has 29 steps
    assert "worker 1 is killed behind step 50" in done.stdout
    on_ray, alone = re.findall(r"fingerprint ([0-9a-f]{32})", done.stdout)
    assert on_ray == alone
