"""The sizes that trainings have where raggedness is not their subject, and how many cases a property is tried on."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import example

T = TypeVar("T")


def cases(few: T, many: T) -> T:
    """Return `few` in `make test`, `many` in `make test-all`."""
    return many if os.environ.get("UNISONO_TESTS") == "all" else few


BATCH, STEPS = 8, 5
ROWS = BATCH * (STEPS - 1) + 1
"""Four replicas have shards of two rows, eight of one; in the last batch one replica has a row, and the others none. So there are two
programs to compile, or one."""

RAGGED = 43
"""Rows whose last batch has fewer rows than eight replicas."""

ROWS_AT_ONCE = cases(8, 10)
"""The batch of them: eight replicas have one row or none in `make test`, which is one program; in `make test-all` two as well."""


def slow(*parameters: Any) -> list[Any]:
    """Return these parameters of a test, marked so that `make test` leaves them out."""
    return [marked(parameter, pytest.mark.slow) for parameter in parameters]


def mostly_slow(names: Iterable[Any], *quick: Any) -> list[Any]:
    """Return all names as parameters of a test, marked slow but for the quick ones, which are some of them."""
    names = list(names)
    assert all(name in names for name in quick), quick
    return [*quick, *slow(*(name for name in names if name not in quick))]


def tried_on(*values: Any) -> Callable[[Any], Any]:
    """Return a decorator of a property: it is tried on these values, beside those that are drawn."""
    return lambda test: functools.reduce(lambda decorated, value: example(value)(decorated), values, test)


def thorough(*parameters: Any) -> list[Any]:
    """Return these parameters of a test of processes, marked so that `.ci/run` leaves them out as well."""
    return [marked(parameter, pytest.mark.slow, pytest.mark.thorough) for parameter in parameters]


def marked(parameter: Any, *marks: pytest.MarkDecorator) -> Any:
    """Return the parameter with these marks; a tuple is one for each argument."""
    return pytest.param(*(parameter if type(parameter) is tuple else (parameter,)), marks=marks)
