"""Cores, devices and thread pools: one fingerprint, or a clear message."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest

from processes import HERE, environment

FAMILY = "conv"


@functools.cache
def trained(devices: int = 1, cores: int | None = None, threads: int | None = None) -> tuple[str, str]:
    """(fingerprint, what was said) of a fresh process that may use some of the cores."""
    spec = {"devices": devices, "replicas": 8, "families": [FAMILY]}
    may_use = sorted(os.sched_getaffinity(0))[:cores]
    done = subprocess.run(
        [sys.executable, "-W", "always", str(HERE / "train_and_print.py"), json.dumps(spec)],
        env=environment(**({} if threads is None else {"PJRT_NPROC": str(threads)})),
        preexec_fn=lambda: os.sched_setaffinity(0, may_use),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])[FAMILY]["epochs"][-1], done.stderr


@pytest.mark.parametrize("devices", [1, 2])
def test_cores_change_nothing(devices):
    assert trained(devices, cores=1)[0] == trained(devices)[0] == trained()[0]


@pytest.mark.parametrize(("threads", "devices"), [(1, 1), (3, 2), (8, 1), (16, 2)])
def test_a_pool_of_another_size_is_said(threads, devices):
    """Two fingerprints may be, but never in silence."""
    fingerprint, said = trained(devices, threads=threads)
    if threads == 8:
        assert fingerprint == trained()[0]
    else:
        assert f"JAX runs with {threads} CPU threads here, and runs of 8 replicas use 8" in said
