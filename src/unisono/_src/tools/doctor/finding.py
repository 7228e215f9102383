"""What a check finds, and the text of findings."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from unisono._src.typing import Json


class PromiseVerdict(enum.StrEnum):
    """What a fact means for the promise of the same bits."""

    OK = "ok"
    NOTE = "note"
    """The promise holds, and this is worth knowing."""
    BREAKS = "breaks"
    """Placements, runs or processes may have other bits, or a strategy refuses to start."""
    UNSEEN = "unseen"
    """The fact could not be looked at."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fact, with a verdict."""

    section: str
    subject: str
    fact: str
    verdict: PromiseVerdict = PromiseVerdict.OK
    advice: str = ""
    """What to write to mend it."""

    def to_json(self) -> dict[str, Json]:
        return dataclasses.asdict(self)


def read_finding(record: Mapping[str, str]) -> Finding:
    """Read a finding from its record in JSON."""
    return Finding(record["section"], record["subject"], record["fact"], PromiseVerdict(record["verdict"]), record["advice"])


def run_check(section: str, subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Run a check and collect its findings. A check that raises gives one finding with the error."""
    try:
        return list(check())
    except Exception as error:  # the other checks still run, and the error is a finding too
        return [Finding(section, subject, f"{type(error).__name__}: {error}", PromiseVerdict.UNSEEN)]


def compute_exit_code(findings: Sequence[Finding]) -> int:
    """Compute the exit code: 1, 2 or 0. 1 if something breaks the promise; else 2 if something could not be looked at; else 0."""
    verdicts = {finding.verdict for finding in findings}
    if PromiseVerdict.BREAKS in verdicts:
        return 1
    return 2 if PromiseVerdict.UNSEEN in verdicts else 0


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
