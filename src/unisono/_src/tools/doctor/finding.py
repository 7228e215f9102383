"""A finding: one fact, and whether the promise holds with it."""

from __future__ import annotations

import dataclasses
import enum
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
