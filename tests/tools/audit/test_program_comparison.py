"""The programs of two processes are compared where they have the same shapes, and else in order."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from unisono._src.tools.audit.difference_place import find_equation
from unisono._src.tools.records import RunRecord


def make_equation(rows: int, constant: str, **changes: Any) -> dict[str, Any]:
    return {
        "primitive": "mul",
        "operands": ["", constant],
        "params": {},
        "shapes": [f"float32[{rows},3]", "float32[]", f"float32[{rows},3]"],
        "layer": "gate",
        "line": ["train.py", 29, "call"],
        **changes,
    }


def make_record(*programs: tuple[int, str], **changes: Any) -> RunRecord:
    details = [{"of": "program", "step": 0, "equations": [make_equation(*program, **changes)]} for program in programs]
    return RunRecord(pathlib.Path("run"), [], details)


def test_a_process_with_fewer_replicas_is_compared_by_the_shapes_of_its_programs():
    one = make_record((6, "1.1"), (5, "1.2"))
    assert find_equation(one, make_record((5, "1.2")), 0) is None
    found = find_equation(one, make_record((5, "1.1")), 0)
    assert found is not None
    assert found.describe().values == ("1.2", "1.1")


@pytest.mark.parametrize(
    ("other", "said", "values"),
    [
        (
            make_record((6, "1.1"), (4, "1.2")),
            "mul(float32[5,3], float32[]) -> float32[5,3]; in the other run mul(float32[4,3], float32[]) -> float32[4,3]",
            None,
        ),
        (
            make_record((6, "1.1"), (5, "1.2"), params={"axes": "(0,)"}),
            "mul(float32[6,3], float32[]) -> float32[6,3]",
            ("", "axes=(0,)"),
        ),
    ],
)
def test_equations_differ_by_shapes_or_parameters(other, said, values):
    found = find_equation(make_record((6, "1.1"), (5, "1.2")), other, 0)
    assert found is not None
    place = found.describe()
    assert (place.layer, place.equation, place.values) == ("gate", said, values)


def test_the_line_is_that_of_the_equation_or_of_the_nearest_one_before_it():
    one, other = make_record((6, "1.1"), line=None), make_record((6, "1.2"), line=None)
    for record in (one, other):
        record.details[0]["equations"].insert(0, make_equation(6, "1"))
    found = find_equation(one, other, 0)
    assert found is not None
    assert found.line == ["train.py", 29, "call"]
