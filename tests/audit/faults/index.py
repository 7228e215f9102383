"""The planted faults: scripts of which two runs part, each with a twin of which they do not.

The scripts are as users write them. Nothing in them, and no name of theirs, tells what is wrong: the line that is to be found ends with
`# here`, and this index says the rest.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib

FOLDER = pathlib.Path(__file__).parent
MARK = "# here"


class Cause(enum.Enum):
    """Why two runs part."""

    HOST_RANDOM = "Python or NumPy draw numbers from a generator without a seed, outside of the step."
    STEP_RANDOM = "The step draws numbers, and not from a Keras SeedGenerator."
    TIME = "A value comes from a clock."
    HASH_ORDER = "A value or an order comes from hash(), which differs from one Python to the next."
    THREAD_ORDER = "Rows come in the order in which threads finish."
    FILES = "A file that an earlier run has left is read."
    LAYER_STATE = "A layer keeps state in an attribute of its own, which is no Keras variable."
    DEVICES = "A number comes from the count of devices."
    SHAPE = "A shape comes from the count of devices."
    PROCESS = "A value depends on the process: on its number, or on how many there are."
    PROCESS_ROWS = "Each process reads other rows."
    COLLECTIVE = "The script adds over devices or processes by itself."
    BATCH_STATISTICS = "A layer computes with statistics over the rows, or with their count; a replica has its own rows alone."
    RANDOM_LAYER = "A layer draws random numbers from a seed; each replica draws for itself."
    BATCH_LOSS = "A loss looks at all rows together; a replica has its own rows alone."
    WEIGHTING = "A divisor or a length is taken from a replica's rows, and is not that of the whole batch."
    ROWS = "Replicas see rows twice, or not at all."


class Kind(enum.Enum):
    """Which two runs part. Runs of all kinds but `REPLICAS` are compared by their bits."""

    REPEAT = "The same placement twice, with other seeds of hash()."
    DEVICES = "One device, and two devices."
    PROCESSES = "One process, and two processes of one device."
    REPLICAS = "R = 1, and R = 4: compared within a tolerance."


@dataclasses.dataclass(frozen=True)
class PlantedFault:
    """A script with a fault, and its twin."""

    number: int
    fault: str
    """The letter of the file with the fault, a or b. The other one is its twin."""
    kind: Kind
    cause: Cause
    layer: str | None = None
    """The names of the layer in which runs part and of those around it, from the model down and without the model's own, with "/" between them;
    None where the fault is in no layer and acts on no single one."""
    first_step: int = 1
    """The first step after which the bits differ; 0 where they differ before any step."""
    has_other_entry: bool = False
    """Whether the state before the first step differs already: a callback has changed it when the step began."""
    error: str | None = None
    """What the error says, where one of the two placements is refused."""
    warning: str | None = None
    """What a warning says, where Unisono warns."""

    @property
    def fault_path(self) -> pathlib.Path:
        return FOLDER / f"train_{self.number:02}{self.fault}.py"

    @property
    def twin_path(self) -> pathlib.Path:
        return FOLDER / f"train_{self.number:02}{'ab'.replace(self.fault, '')}.py"

    @property
    def line(self) -> int:
        """The number of the line that is to be found."""
        lines = self.fault_path.read_text().splitlines()
        (line,) = (number for number, text in enumerate(lines, 1) if text.endswith(MARK))
        return line


PYTHON_IN_A_STEP = "A callback to Python"
OTHER_STATE = "starts from other values of variables in process 1 than in process 0"
OTHER_PROGRAM = "is computed by another program in process 1 than in process 0"
FAULTS = (
    PlantedFault(1, "a", Kind.REPEAT, Cause.HOST_RANDOM),
    PlantedFault(2, "b", Kind.REPEAT, Cause.HOST_RANDOM, "first", first_step=4),
    PlantedFault(3, "a", Kind.REPEAT, Cause.HOST_RANDOM, "words", first_step=0),
    PlantedFault(4, "b", Kind.REPEAT, Cause.HOST_RANDOM),
    PlantedFault(5, "a", Kind.REPEAT, Cause.STEP_RANDOM, "soft"),
    PlantedFault(6, "b", Kind.REPEAT, Cause.STEP_RANDOM, "patch", warning=PYTHON_IN_A_STEP),
    PlantedFault(7, "a", Kind.REPEAT, Cause.TIME, has_other_entry=True),
    PlantedFault(8, "b", Kind.REPEAT, Cause.TIME, "one_rest", first_step=0),
    PlantedFault(9, "a", Kind.REPEAT, Cause.HASH_ORDER),
    PlantedFault(10, "a", Kind.REPEAT, Cause.HASH_ORDER),
    PlantedFault(11, "b", Kind.REPEAT, Cause.HASH_ORDER, "users/narrow", first_step=0),
    PlantedFault(12, "a", Kind.REPEAT, Cause.HASH_ORDER),
    PlantedFault(13, "b", Kind.REPEAT, Cause.THREAD_ORDER),
    PlantedFault(14, "a", Kind.DEVICES, Cause.DEVICES, "gate"),
    PlantedFault(15, "b", Kind.DEVICES, Cause.SHAPE, "experts", first_step=0),
    PlantedFault(16, "a", Kind.DEVICES, Cause.SHAPE),
    PlantedFault(17, "b", Kind.DEVICES, Cause.COLLECTIVE),
    PlantedFault(18, "a", Kind.PROCESSES, Cause.PROCESS, first_step=0),
    PlantedFault(19, "b", Kind.PROCESSES, Cause.PROCESS, "zoom", error=OTHER_PROGRAM),
    PlantedFault(20, "b", Kind.PROCESSES, Cause.PROCESS, first_step=7, error=OTHER_STATE),
    PlantedFault(21, "a", Kind.PROCESSES, Cause.PROCESS_ROWS, error="has other rows in process 1 than in process 0"),
    PlantedFault(22, "b", Kind.PROCESSES, Cause.PROCESS, error="Let every process pass the same"),
    PlantedFault(23, "a", Kind.REPLICAS, Cause.BATCH_STATISTICS, "even"),
    PlantedFault(24, "b", Kind.PROCESSES, Cause.LAYER_STATE, "warm"),
    PlantedFault(25, "a", Kind.PROCESSES, Cause.LAYER_STATE, "turn", error=OTHER_PROGRAM),
    PlantedFault(26, "b", Kind.REPLICAS, Cause.WEIGHTING),
    PlantedFault(27, "a", Kind.PROCESSES, Cause.COLLECTIVE, first_step=4),
    PlantedFault(28, "b", Kind.REPLICAS, Cause.BATCH_STATISTICS, "one_norm"),
    PlantedFault(29, "a", Kind.REPLICAS, Cause.RANDOM_LAYER, "rest"),
    PlantedFault(30, "a", Kind.REPLICAS, Cause.BATCH_STATISTICS, "even"),
    PlantedFault(31, "b", Kind.REPLICAS, Cause.BATCH_LOSS, warning="makes of all rows together what is not made of their parts"),
    PlantedFault(32, "a", Kind.REPLICAS, Cause.BATCH_LOSS, "spread"),
    PlantedFault(33, "b", Kind.REPLICAS, Cause.WEIGHTING, warning="Warning"),
    PlantedFault(34, "a", Kind.REPLICAS, Cause.ROWS),
    PlantedFault(35, "b", Kind.REPLICAS, Cause.WEIGHTING, warning="Warning"),
    PlantedFault(36, "a", Kind.REPEAT, Cause.FILES),
)
"""By number."""
