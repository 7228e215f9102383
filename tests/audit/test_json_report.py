"""The report in JSON: it holds only what JSON has, and a loss that is not told is another than one that is not finite."""

from __future__ import annotations

import dataclasses
import json
import math

from audit_samples import equal_report, sample_run


def test_losses_that_are_not_told_or_not_finite():
    run = sample_run("1 device", (2.0, None, math.nan, -math.inf))
    report = dataclasses.replace(equal_report(), runs=(run,))
    written = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert written["runs"][0]["losses"] == [2.0, None, "nan", "-inf"]
