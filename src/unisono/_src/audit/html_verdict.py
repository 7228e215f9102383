"""The verdict of an audit in words: a headline, and the sentence below it."""

from __future__ import annotations

from typing import NamedTuple

from unisono._src.audit.html_numbers import count
from unisono._src.audit.report import AuditReport, Difference

KINDS = {
    "rows": "the rows of the batch",
    "entry": "the state before the step",
    "gradient": "the gradient",
    "weight": "the weights after the step",
    "state": "the state after the step",
    "optimizer": "the optimizer's state after the step",
    "program": "the program of the step",
    "steps": "the number of steps",
    "exit": "the exit code",
}
"""What differs, by the kind of a difference."""


class Verdict(NamedTuple):
    """What the first screen says."""

    tone: str
    """"same", "parted" or "open": how the page is coloured."""
    headline: str
    layer: str | None
    """The layer in which the runs part, which ends the headline."""
    sentence: str


def decide_verdict(report: AuditReport) -> Verdict:
    """Return the verdict of a report."""
    if report.difference is not None:
        reason = "Cause" if report.difference.is_certain else "Probable cause"
        return Verdict(
            "parted", write_headline(report.difference), report.difference.layer, f"{reason}: {report.difference.cause_words}"
        )
    if len(report.runs) < 2:
        return Verdict(
            "open", "Nothing was compared", None, f"There is {count(len(report.runs), 'run')}, and it takes two to compare."
        )
    if not report.equal:
        return Verdict("open", "The runs are not equal", None, "Which step is the first to differ was not found.")
    if not any(run.steps for run in report.runs):
        return Verdict("open", "No step was compared", None, "The script trained no step under a strategy of Unisono.")
    steps = max(run.steps for run in report.runs)
    sentence = f"{count(len(report.runs), 'run')} of {count(steps, 'step')}: rows, gradients, weights and optimizer state are the same, bit by bit."
    return Verdict("same", "Same bits on all placements", None, sentence)


def write_headline(difference: Difference) -> str:
    """Return when two runs part."""
    if difference.kind == "exit":
        return "A run failed"
    if difference.kind == "steps":
        return "The runs have different numbers of steps"
    return f"The runs part at step {difference.step}" if difference.step else "The runs part before the first step"
