"""The report for a terminal says what the HTML report says: where runs part, why, and what to write instead."""

from __future__ import annotations

import dataclasses

import pytest

from audit_samples import equal_report, parted_report
from unisono._src.audit.difference_kinds import KIND_WORDS
from unisono._src.audit.html_report import render_report
from unisono._src.audit.text_report import WIDTH, format_report


def test_equal_runs_are_said_to_be_equal():
    text = format_report(equal_report())
    assert text.splitlines()[0].split() == ["run", "devices", "processes", "steps", "last", "loss", "digest", "seconds"]
    assert text.endswith("Equal: 3 runs with R = 8 have the same bits in their first 4 steps.")


def test_a_difference_is_told_with_place_cause_and_advice():
    report = parted_report()
    difference = report.difference
    assert difference is not None
    assert difference.source is not None
    text = format_report(report)
    assert "Not equal: '1 device' and '8 devices' part in step 2" in text
    assert f"Probable cause: {difference.cause_words}"[:WIDTH] in text
    assert f"Instead: {difference.what_to_write}"[:40] in text
    assert f"{difference.source.file}:{difference.source.line}" in text
    assert difference.layer in text


@pytest.mark.parametrize("kind", KIND_WORDS)
def test_both_reports_have_the_same_words_for_a_kind(kind):
    difference = parted_report().difference
    assert difference is not None
    report = dataclasses.replace(parted_report(), difference=dataclasses.replace(difference, kind=kind))
    assert f"in {KIND_WORDS[kind]}." in " ".join(format_report(report).split())
    assert KIND_WORDS[kind] in render_report(report).replace("&#x27;", "'")


def test_a_comparison_of_replicas_names_couplings_and_rows():
    comparison = parted_report().comparison
    assert comparison is not None
    text = format_report(parted_report())
    assert f"R = 1 and R = {comparison.replicas}: the weights are not near each other." in text
    assert all(str(coupling.cause) in text for coupling in comparison.couplings)
    assert "missing" in text
