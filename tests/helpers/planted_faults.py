"""The planted faults: scripts of which two runs part, each with a twin of which they do not.

A file holds both. Lines that end with `# fault` are of the fault alone; where they stand, the twin has the lines of the comments `# twin:`. A line
that ends with `# here` is the one that the audit names. The scripts that are written of it say nothing of this.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib

FOLDER = pathlib.Path(__file__).parents[1] / "tools" / "audit" / "faults"
FAULT, HERE, TWIN = "  # fault", "  # here", "# twin: "


class Pair(enum.Enum):
    """Which two runs part."""

    REPEAT = "The same placement twice, with other seeds of hash()."
    DEVICES = "One device, and two devices."
    PROCESSES = "One process, and two processes of one device."


@dataclasses.dataclass(frozen=True)
class PlantedFault:
    """A script with a fault, and what an audit says of it."""

    number: int
    pair: Pair
    cause: str
    kind: str
    step: int = 1
    """The first step that differs; 0 where the state before it does."""
    layer: str | None = None
    """The layer in which runs part, and those around it, from the model down, without the model's own."""
    said: str = ""
    """What else the audit says: of values, or of an error."""

    @property
    def name(self) -> str:
        return f"train_{self.number:02}"

    def write_fault(self, folder: pathlib.Path) -> tuple[pathlib.Path, int | None]:
        """Return (the script, the number of the line that the audit names)."""
        lines = [line for line in self._read_lines() if not line.strip().startswith(TWIN)]
        named = next((number for number, line in enumerate(lines, 1) if line.endswith(HERE)), None)
        return write_script(folder / f"{self.name}.py", [line.removesuffix(HERE).removesuffix(FAULT) for line in lines]), named

    def write_twin(self, folder: pathlib.Path) -> pathlib.Path:
        """Write the script without the fault. A comment's line stands as deep as the first line in whose place it is."""
        lines: list[str] = []
        depth: int | None = None
        for line in self._read_lines():
            indented = len(line) - len(line.lstrip())
            bare = line.removesuffix(HERE)
            if bare.endswith(FAULT):
                depth = indented if depth is None else depth
            elif line.strip().startswith(TWIN):
                lines.append(" " * (indented if depth is None else depth) + line.strip().removeprefix(TWIN))
            else:
                depth = depth if not line.strip() else None
                lines.append(bare)
        return write_script(folder / f"{self.name}_twin.py", lines)

    def _read_lines(self) -> list[str]:
        return (FOLDER / f"{self.name}.py").read_text().splitlines()


def write_script(path: pathlib.Path, lines: list[str]) -> pathlib.Path:
    path.write_text("\n".join(lines) + "\n")
    return path


FAULTS = (
    PlantedFault(1, Pair.REPEAT, "each run", "rows", said="array: [0] row: 0 of the global batch replica: 0 values:"),
    PlantedFault(2, Pair.REPEAT, "each run", "entry", 4, "first"),
    PlantedFault(4, Pair.REPEAT, "each run", "gradient", said="what differs is an argument of strategy.run"),
    PlantedFault(5, Pair.REPEAT, "each run", "gradient", layer="soft", said="SeedGenerator"),
    PlantedFault(6, Pair.REPEAT, "each run", "gradient", layer="patch", said="calls Python back"),
    PlantedFault(7, Pair.REPEAT, "each run", "entry", 0, said="sgd/learning_rate"),
    PlantedFault(8, Pair.REPEAT, "each run", "entry", 0, "one_rest"),
    PlantedFault(9, Pair.REPEAT, "hash order", "rows", said="array: [1]"),
    PlantedFault(11, Pair.REPEAT, "hash order", "entry", 0, "users/narrow"),
    PlantedFault(12, Pair.REPEAT, "each run", "rows", said="objects in the order of a set"),
    PlantedFault(14, Pair.DEVICES, "devices", "gradient", layer="gate", said="values: 0.2236"),
    PlantedFault(
        15, Pair.DEVICES, "devices", "entry", 0, "experts", "values: shape (4, 8, 12); in the other run shape (2, 8, 12)"
    ),
    PlantedFault(16, Pair.DEVICES, "devices", "rows", said="values: 32 rows; in the other run 16 rows"),
    PlantedFault(18, Pair.PROCESSES, "process", "entry", 0, said="values: 0.0199999996; in the other run 0.0399999991"),
    PlantedFault(19, Pair.PROCESSES, "process", "gradient", layer="zoom"),
    PlantedFault(20, Pair.PROCESSES, "process", "exit", 7, said="starts from other values of variables in process 1"),
    PlantedFault(21, Pair.PROCESSES, "process", "exit", said="has other rows in process 1 than in process 0"),
    PlantedFault(25, Pair.REPEAT, "earlier run", "rows"),
)
"""By number."""
