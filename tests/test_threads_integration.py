"""Cores, devices and thread pools: one fingerprint, or a clear message."""

from __future__ import annotations

import functools
import json
import os

import pytest

from processes import HERE, python

FAMILY = "conv"
ON_CORES = """
import os, runpy, sys
os.sched_setaffinity(0, map(int, sys.argv.pop(1).split(",")))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""`python -c ON_CORES 0,1 PROGRAM ARGUMENTS`: as taskset would run it, whether a machine has that or not."""


@functools.cache
def trained(devices: int = 1, cores: int | None = None, threads: int | None = None) -> tuple[str, str]:
    """(fingerprint, what was said) of a fresh process that may use some of the cores."""
    spec = {"devices": devices, "replicas": 8, "families": [FAMILY]}
    cores_to_use = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
    done = python(
        *("-W", "always", "-c", ON_CORES, cores_to_use, str(HERE / "train_and_print.py"), json.dumps(spec)),
        **({} if threads is None else {"PJRT_NPROC": str(threads)}),
    )
    assert done.returncode == 0, done.stderr[-3000:]
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
