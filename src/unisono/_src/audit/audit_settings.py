"""The settings of an audit: the script, and what its runs are compared on."""

from __future__ import annotations

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class AuditSettings:
    """The options of an audit."""

    program: tuple[str, ...]
    steps: int = 20
    devices: tuple[int, ...] = ()
    """Numbers of devices; empty stands for 1, 2 and R."""
    processes: tuple[int, ...] = ()
    replicas: bool = False
    """Whether R = 1 is compared with the R of the script as well."""
    against: pathlib.Path | None = None
    """The directory of a record to compare with, in place of other placements."""
    limit: float = 1800.0
    """Seconds for each run."""
