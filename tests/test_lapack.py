"""Linear algebra has one thread where results are to be the same, and NumPy keeps those that it has."""

from __future__ import annotations

import json

from processes import python

THREADS = """
import json
import numpy as np
import unisono as un
from threadpoolctl import threadpool_info

before = {of["filepath"]: of["num_threads"] for of in threadpool_info() if of["user_api"] == "blas"}
un.OneDeviceStrategy()
print(json.dumps([(path, before.get(path), of["num_threads"]) for of in threadpool_info() if (path := of["filepath"]) in before]))
"""


def test_a_strategy_takes_one_thread_for_linear_algebra():
    done = python("-c", THREADS)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found
    for path, before, after in found:
        assert after == (before if "numpy.libs" in path else 1)
