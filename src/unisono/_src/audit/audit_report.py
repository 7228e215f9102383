"""The report of an audit: what was run, and where two runs part. Its JSON is what `--json` writes."""

from __future__ import annotations

import dataclasses
import math

from unisono._src.audit.cause import Cause
from unisono._src.typing import Json, UserObject

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class AuditedRun:
    """A run of the script on one placement."""

    name: str
    """What tables call the run: "1 device", "2 processes", "1 device, again"."""
    devices: int | None
    """Devices of each process; None where the run ended before its first step."""
    processes: int
    steps: int
    exit_code: int | None
    """None for a recorded run that was not started here."""
    losses: tuple[float | None, ...]
    """By step; None where a step does not tell its loss."""
    digest: str | None
    """A digest over all that is recorded of the last step; None without steps."""
    seconds: float
    end_of_output: str = ""
    """The last lines that a failed run wrote; empty where the run succeeded."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A line of the user's."""

    file: str
    line: int
    text: str
    """The line, without the space around it."""
    function: str = ""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between two runs, and its probable cause."""

    runs: tuple[str, str]
    """The names of the runs that part."""
    step: int
    """The number of the step, from 1 on; 0 where the runs part before any step."""
    kind: str
    """What differs: one of `difference_kinds`."""
    variable: str | None
    """The path of the first variable that differs."""
    layer: str | None
    """The layer in which the runs part, by the names from the model down, with "/" between them."""
    replica: int | None
    equation: str | None
    """The first equation of the step's program that differs, as JAX prints it."""
    source: Source | None
    cause: Cause
    cause_words: str
    """The cause in a sentence or two."""
    what_to_write: str
    """What to write instead."""
    is_certain: bool = False
    """Whether the difference itself shows the cause. Otherwise the cause is the most probable one."""
    differing: tuple[str, ...] = ()
    """The paths of all variables that differ in this step, in this kind."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The fraction of a layer's digests that differ between two runs, for each layer and step."""

    runs: tuple[str, str]
    layers: tuple[str, ...]
    steps: tuple[int, ...]
    fractions: tuple[tuple[float, ...], ...]
    """(layer, step)"""


@dataclasses.dataclass(frozen=True)
class Coupling:
    """A place where R changes the result by more than rounding."""

    layer: str | None
    """None where it is a loss or a step of the user's."""
    cause: Cause
    why: str
    what_to_write: str
    source: Source | None = None


@dataclasses.dataclass(frozen=True)
class ReplicaRows:
    """The rows that a replica saw in the steps that were compared."""

    replica: int
    rows: int
    duplicates: int
    """Rows that came in an earlier place of the same pass as well."""
    missing: int
    """Rows that R = 1 has in the place of this replica, and that came to no replica."""


@dataclasses.dataclass(frozen=True)
class ReplicaComparison:
    """R = 1 beside R = n."""

    replicas: int
    tolerance: float
    distance: float
    """The largest difference of a weight after the last step, relative to the size of its variable."""
    is_near: bool
    couplings: tuple[Coupling, ...]
    weightings: tuple[str, ...]
    """What was warned of weightings that are not exact."""
    rows: tuple[ReplicaRows, ...]


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The result of an audit: its runs, and where two of them part."""

    script: str
    command: tuple[str, ...]
    versions: dict[str, str]
    replicas: int | None
    """R, the same in all runs; None where no run has trained."""
    runs: tuple[AuditedRun, ...]
    equal: bool
    difference: Difference | None
    divergence: tuple[Divergence, ...]
    comparison: ReplicaComparison | None
    """With `--replicas` only."""
    warnings: tuple[str, ...]
    format: int = FORMAT

    def to_json(self) -> dict[str, Json]:
        """Return the report as numbers, strings, lists and dicts."""
        return convert_to_json(dataclasses.asdict(self))


def convert_to_json(value: UserObject) -> Json:
    if isinstance(value, dict):
        return {str(key): convert_to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_json(item) for item in value]
    return name_number(value) if isinstance(value, float) else value


def name_number(number: float) -> float | str:
    """Return a number as JSON has it: in words where it is not finite."""
    return number if math.isfinite(number) else str(number)
