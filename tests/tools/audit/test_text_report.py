"""The reports for a terminal and in JSON say what the HTML report says: where runs part, why, and what to write instead."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from audit_samples import equal_report, parted_report, sample_run
from unisono._src.tools.audit.audit_report import WORDS_OF_KINDS, format_report
from unisono._src.tools.audit.html_report import render_report


def test_equal_runs_are_said_to_be_equal():
    text = format_report(equal_report())
    assert text.splitlines()[0].split() == ["run", "devices", "processes", "steps", "last", "loss", "digest", "seconds"]
    assert text.endswith("Equal: 3 runs with R = 8 have the same bits in their first 4 steps.")


def test_a_difference_is_told_with_place_cause_and_advice():
    said = " ".join(format_report(parted_report("train.py")).split())
    assert said.endswith(
        "Not equal: '1 device' and '8 devices' part in step 2, in the gradient. layer: block/attention/query variable: "
        "block/attention/query/kernel, and 1 more array: [0] row: 7 of the global batch replica: 3 equation: add(f32[4], f32[4]) -> f32[4] "
        "values: 0.25; in the other run 0.5 line: train.py:3 noise = numpy.random.normal() Cause: A number comes from the count of devices. "
        "Instead: Take num_replicas_in_sync. A run warned: The clock is read."
    )


@pytest.mark.parametrize("kind", WORDS_OF_KINDS)
def test_both_reports_have_the_same_words_for_a_kind(kind):
    difference = parted_report().difference
    assert difference is not None
    report = dataclasses.replace(parted_report(), difference=dataclasses.replace(difference, kind=kind))
    assert f"in {WORDS_OF_KINDS[kind]}." in " ".join(format_report(report).split())
    assert WORDS_OF_KINDS[kind] in render_report(report).replace("&#39;", "'")


def test_json_tells_losses_that_are_not_told_from_those_that_are_not_finite():
    run = sample_run("1 device", (2.0, None, math.nan, -math.inf))
    report = dataclasses.replace(equal_report(), runs=(run,))
    written = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert written["runs"][0]["losses"] == [2.0, None, "nan", "-inf"]
    assert written["equal"] is True
