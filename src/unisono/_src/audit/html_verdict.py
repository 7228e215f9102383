"""The verdict of an audit in words: a headline, and the sentence below it."""

from __future__ import annotations

from typing import NamedTuple

from unisono._src.audit.audit_report import AuditReport, Difference
from unisono._src.audit.difference_kinds import EXIT, STEPS
from unisono._src.audit.html_numbers import count_nouns


class AuditVerdict(NamedTuple):
    """The words of the first screen."""

    tone: str
    """"same", "parted" or "open": how the page is coloured."""
    headline: str
    layer: str | None
    """The layer in which the runs part, which ends the headline."""
    sentence: str


def decide_verdict(report: AuditReport) -> AuditVerdict:
    """Return the verdict of a report."""
    if report.difference is not None:
        reason = "Cause" if report.difference.is_certain else "Probable cause"
        return AuditVerdict(
            "parted", write_headline(report.difference), report.difference.layer, f"{reason}: {report.difference.cause_words}"
        )
    if len(report.runs) < 2:
        return AuditVerdict(
            "open", "Nothing was compared", None, f"There is {count_nouns(len(report.runs), 'run')}, and it takes two to compare."
        )
    if not report.equal:
        return AuditVerdict("open", "The runs are not equal", None, "Which step is the first to differ was not found.")
    if not any(run.steps for run in report.runs):
        return AuditVerdict("open", "No step was compared", None, "The script trained no step under a strategy of Unisono.")
    steps = max(run.steps for run in report.runs)
    compared = f"{count_nouns(len(report.runs), 'run')} of {count_nouns(steps, 'step')}"
    sentence = f"{compared}: rows, gradients, weights and optimizer state are the same, bit by bit."
    return AuditVerdict("same", "Same bits on all placements", None, sentence)


def write_headline(difference: Difference) -> str:
    """Return when two runs part, as a headline."""
    if difference.kind == EXIT:
        return "A run failed"
    if difference.kind == STEPS:
        return "The runs have different numbers of steps"
    return f"The runs part at step {difference.step}" if difference.step else "The runs part before the first step"
