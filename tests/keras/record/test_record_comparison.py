"""Two records are compared step by step: rows first, then the state before a step, then what the step makes."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from unisono._src.tools.records import (
    Program,
    RecordedStep,
    RunRecord,
    Start,
    Variable,
    find_difference,
    list_fact_differences,
)

VARIABLES = [
    Variable("gradient", "net/wide/kernel", (3,)),
    Variable("weight", "net/wide/kernel", (3,)),
    Variable("optimizer", "sgd/learning_rate", ()),
]


def make_step(number: int, **changes: Any) -> RecordedStep:
    """Return a step whose digests are its number and the place of the variable."""
    program = Program("train", VARIABLES, 1, {"replicas": 4}, {"devices": 1})
    digests = tuple((number, place) for place in range(len(VARIABLES)))
    return RecordedStep(number, program, (0, number), 8, 0.5, ((number, 7),), digests)._replace(**changes)


def make_record(*steps: RecordedStep) -> RunRecord:
    return RunRecord(pathlib.Path("run"), [Start(0, ["train.py"], 0.0, {step.number: step for step in steps})])


def change_digest(step: RecordedStep, place: int) -> RecordedStep:
    digests = list(step.digests)
    digests[place] = (99, 99)
    return step._replace(digests=tuple(digests))


PLAIN = [make_step(number) for number in range(4)]


def test_equal_records_have_no_difference():
    assert find_difference(make_record(*PLAIN), make_record(*PLAIN), 20) is None


@pytest.mark.parametrize(
    ("changed", "kind", "variables"),
    [
        (PLAIN[2]._replace(row_digests=((5, 5),)), "rows", ()),
        (PLAIN[2]._replace(entry=((2, 1), (0, 0))), "entry", ("net/wide/kernel", "sgd/learning_rate")),
        (change_digest(PLAIN[2], 0), "gradient", ("net/wide/kernel",)),
        (change_digest(PLAIN[2], 1), "weight", ("net/wide/kernel",)),
        (change_digest(PLAIN[2], 2), "optimizer", ("sgd/learning_rate",)),
    ],
)
def test_the_first_difference_names_step_kind_and_variables(changed, kind, variables):
    other = make_record(*PLAIN[:2], changed, PLAIN[3])
    found = find_difference(make_record(*PLAIN), other, 20)
    assert found is not None
    assert (found.step, found.kind, found.variables) == (2, kind, variables)


def test_rows_come_before_what_is_made_of_them():
    changed = change_digest(PLAIN[1], 0)._replace(row_digests=((5, 5),))
    found = find_difference(make_record(*PLAIN), make_record(PLAIN[0], changed), 20)
    assert found is not None
    assert (found.step, found.kind) == (1, "rows")


def test_a_state_that_was_assigned_to_what_the_step_before_left_is_no_difference():
    left = tuple(digest for variable, digest in zip(VARIABLES, PLAIN[1].digests, strict=True) if variable.kind != "gradient")
    other = make_record(*PLAIN[:2], PLAIN[2]._replace(entry=left), PLAIN[3])
    assert find_difference(make_record(*PLAIN), other, 20) is None


def test_a_record_with_fewer_steps_differs_and_steps_behind_the_last_wanted_one_do_not():
    assert find_difference(make_record(*PLAIN), make_record(*PLAIN[:3]), 3) is None
    found = find_difference(make_record(*PLAIN), make_record(*PLAIN[:3]), 4)
    assert found is not None
    assert (found.step, found.kind) == (3, "steps")


def test_another_shape_is_found_before_the_digests():
    reshaped = [variable._replace(shape=(5,)) if variable.kind == "weight" else variable for variable in VARIABLES]
    step = PLAIN[0]._replace(program=PLAIN[0].program._replace(variables=reshaped))
    found = find_difference(make_record(*PLAIN), make_record(step), 20)
    assert found is not None
    assert (found.kind, found.variables, found.has_other_shapes) == ("entry", ("net/wide/kernel",), True)


def test_facts_that_differ_are_named_with_both_values():
    one, other = ({"replicas": 4, "versions": {"keras": version}} for version in ("3.15.0", "3.15.1"))
    assert list_fact_differences(one, other) == ["versions.keras is '3.15.0' there and '3.15.1' here"]
