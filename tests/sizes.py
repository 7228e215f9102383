"""The sizes that trainings have where raggedness is not their subject, and how many cases a property is tried on."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

BATCH, STEPS = 8, 5
ROWS = BATCH * (STEPS - 1) + 1
"""Four replicas have shards of two rows, eight of one; in the last batch one replica has a row, and the others none. So there are two
programs to compile, or one."""


def cases(few: T, many: T) -> T:
    """`few` in `make test`, `many` in `make test-all`."""
    return many if os.environ.get("UNISONO_TESTS") == "all" else few


def slow(*cases: Any) -> list[Any]:
    """These cases of a parametrized test, which `make test` leaves out."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def thorough(*cases: Any) -> list[Any]:
    """These cases of a test of processes, which `.ci/run` leaves out as well."""
    marks = [pytest.mark.slow, pytest.mark.thorough]
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case in cases]
