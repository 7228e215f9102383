"""Operations have the same bits whatever the number of threads."""

from __future__ import annotations

import json
import os
import random

import pytest

from kept_programs import NOTHING_KEPT
from processes import HERE, python
from sizes import cases

FULL = os.environ.get("UNISONO_MATRIX") == "full"
THREADS = (2, 3, 4, 8, 16) if FULL else cases((2, 3), (2, 3, 8))
COUNT = 200 if FULL else cases(25, 60)
"""Operations of one seed: a minute for a hundred."""


def digests(threads: int, script: str, *words: str) -> dict[str, str]:
    """What a process of so many threads prints; one less for linear algebra, which has none beyond the cores."""
    numbers = {"PJRT_NPROC": str(threads), "OPENBLAS_NUM_THREADS": str(threads - 1)}
    done = python(str(HERE / script), *words, JAX_PLATFORMS="cpu", **numbers, **NOTHING_KEPT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_operations_that_xla_cuts_by_threads_are_cut_by_shapes():
    """Plain ones do differ; where they no longer do, the rules of `contraction` and `kernel` have no use any more."""
    first, *others = (digests(threads, "digest_contractions.py") for threads in (2, 3, 16))
    assert all(other["rewritten"] == first["rewritten"] for other in others)
    assert any(other["plain"][name] != first["plain"][name] for other in others for name in first["plain"] if "conv" in name)


@pytest.mark.matrix
def test_single_operations_do_not_feel_the_threads():
    """UNISONO_SEED, which is printed where this fails, draws the same operations again."""
    seed = os.environ.get("UNISONO_SEED", str(random.randrange(10**6)))
    print(f"UNISONO_SEED={seed}")
    first, *others = (digests(threads, "digest_operations.py", seed, str(COUNT)) for threads in THREADS)
    for threads, other in zip(THREADS[1:], others, strict=True):
        assert {name for name in first if other[name] != first[name]} == set(), f"{threads} threads"
