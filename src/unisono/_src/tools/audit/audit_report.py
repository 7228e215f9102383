"""The report of an audit. It says what was run, and where two runs part. Its JSON is what `--json` writes."""

from __future__ import annotations

import dataclasses
import enum
import math

from unisono._src.tools.records.record_comparison import KIND_WORDS
from unisono._src.typing import Json, UserObject

FORMAT = 1
EXIT = "exit"
WORDS_OF_KINDS = {**KIND_WORDS, EXIT: "the exit code"}


class Cause(enum.StrEnum):
    """Why two runs part. The values stand in the JSON of reports."""

    EACH_RUN = "each run"
    """Runs on the same placement differ: numbers without a seed, a clock, the order of threads."""
    HASH_ORDER = "hash order"
    """Runs differ by the seed of `hash()`, and with it by the order of sets."""
    EARLIER_RUN = "earlier run"
    """The first run differs from all later ones: it has left something that they read."""
    DEVICES = "devices"
    """Runs differ by the count of devices."""
    PROCESS = "process"
    """Runs differ by the number of processes, or in one of them."""
    VERSIONS = "versions"
    """The runs had other versions, another kind of device, or other kernels."""
    SCRIPT = "script"
    """The recorded run was of another script, other arguments, or other data."""


@dataclasses.dataclass(frozen=True)
class AuditedRun:
    """A run of the script on one placement."""

    name: str
    """What tables call the run: "1 device", "2 processes", "1 device, again"."""
    devices: int | None
    """Devices of each process. None if the run ended before its first step."""
    processes: int
    steps: int
    exit_code: int | None
    """None for a recorded run that was not started here."""
    losses: tuple[float | None, ...]
    """The loss of each step. None if a step does not report it."""
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
class Place:
    """Where two runs part, in a step's inputs or program. It is as exact as the records of both allow."""

    layer: str | None = None
    """The layer, by the names from the model down, with "/" between them."""
    array: str | None = None
    """The array of the batch whose rows differ first, as it is taken out of the batch: "[0]['image']"."""
    row: int | None = None
    """The first row of the global batch that differs."""
    replica: int | None = None
    """The replica of this row."""
    equation: str | None = None
    """The first equation of the step's program that differs, or that calls Python back, as JAX prints it."""
    source: Source | None = None
    """The line that JAX knows for the equation, or for the nearest one before it."""
    values: tuple[str, str] | None = None
    """What either run has there: the first values of the row or of the variable, or the constants of the equation."""


@dataclasses.dataclass(frozen=True)
class Difference(Place):
    """The first difference between two runs, and its cause."""

    _: dataclasses.KW_ONLY
    runs: tuple[str, str]
    """The names of the runs that part."""
    step: int
    """The number of the step, from 1 on. 0 if the runs part before any step."""
    kind: str
    """What differs: one of `WORDS_OF_KINDS`."""
    variable: str | None
    """The path of the first variable that differs."""
    cause: Cause
    cause_words: str
    """The cause in a sentence or two."""
    what_to_write: str
    """What to write instead."""
    differing: tuple[str, ...] = ()
    """The paths of all variables that differ in this step, in this kind."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """How much of each layer differs between two runs, by step. It is the fraction of the layer's digests that differ."""

    runs: tuple[str, str]
    layers: tuple[str, ...]
    steps: tuple[int, ...]
    fractions: tuple[tuple[float, ...], ...]
    """(layer, step)"""


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The result of an audit. It has the runs, and where two of them part."""

    script: str
    command: tuple[str, ...]
    versions: dict[str, str]
    replicas: int | None
    """R, the same in all runs. None if no run has trained."""
    runs: tuple[AuditedRun, ...]
    difference: Difference | None
    divergence: tuple[Divergence, ...]
    warnings: tuple[str, ...]
    format: int = FORMAT

    @property
    def equal(self) -> bool:
        return self.difference is None

    def to_json(self) -> dict[str, Json]:
        """Convert the report to numbers, strings, lists and dicts."""
        return convert_to_json({**dataclasses.asdict(self), "equal": self.equal})


def convert_to_json(value: UserObject) -> Json:
    if isinstance(value, dict):
        return {str(key): convert_to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_json(item) for item in value]
    return name_number(value) if isinstance(value, float) else value


def name_number(number: float) -> float | str:
    """Convert a number for JSON. If it is not finite, its name is given."""
    return number if math.isfinite(number) else str(number)
