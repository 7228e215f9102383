"""The findings as text and as JSON."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from unisono._src.tools.doctor.finding import Finding, PromiseVerdict, compute_exit_code
from unisono._src.typing import Json

WIDTH = 118
VERDICT = 8
"""The width of the first column."""


def format_findings(findings: Iterable[Finding]) -> str:
    """Format the findings as a table. Each fact has a line. The advice of a finding, if any, stands below it."""
    lines: list[str] = []
    for section, inside in itertools.groupby(findings, key=lambda finding: finding.section):
        lines += ["", section]
        for finding in inside:
            lines += format_finding(finding)
    return "\n".join(lines)


def format_finding(finding: Finding) -> list[str]:
    indent = " " * (2 + VERDICT)
    first = f"  {finding.verdict.value:<{VERDICT}}{finding.subject}: "
    wrapped = textwrap.wrap(finding.fact, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    if finding.advice:
        wrapped += textwrap.wrap(
            finding.advice, WIDTH, initial_indent=f"{indent}write: ", subsequent_indent=indent + "       ", break_on_hyphens=False
        )
    return wrapped


def format_verdict(findings: Sequence[Finding]) -> str:
    """Format the last line, which counts the verdicts."""
    counts = Counter(finding.verdict for finding in findings)
    breaks = counts[PromiseVerdict.BREAKS]
    unseen = counts[PromiseVerdict.UNSEEN]
    notes = counts[PromiseVerdict.NOTE]
    parts = [
        f"{breaks or 'Nothing'} break{'s' * (breaks < 2)} the promise of the same bits here",
        f"{unseen} could not be looked at" * bool(unseen),
        f"{notes} note{'s' * (notes != 1)}" * bool(notes),
    ]
    return f"\n{'; '.join(filter(None, parts))}."


def make_json_record(findings: Sequence[Finding], trained: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Collect exit code, findings and bits of each training, for programs."""
    return {
        "exit_code": compute_exit_code(findings),
        "findings": [finding.to_json() for finding in findings],
        "placements": list(trained),
    }
