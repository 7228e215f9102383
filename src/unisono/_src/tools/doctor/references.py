"""The kept fingerprints of twelve small trainings.

They are kept for pairs of versions and for processors; a table shows the pairs with the same bits. The file lies beside this one. A program
in the tests writes it. Measured: the versions, the choice between native kernels and XLA's, and the processor as XLA sees it decide the
bits of a training. The level of the native kernels does not: AVX2 and AVX-512 gave the same fingerprints. The build of the native kernels
is noted and not compared, so that a change of their source that moves bits is noticed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence

FILE = pathlib.Path(__file__).parent / "references.json"

LIBRARIES = ("keras", "jax", "jaxlib")
"""The libraries whose versions belong to an entry."""


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The versions, kernels and processor of the kept trainings. They decide the bits."""

    keras: str
    jax: str
    jaxlib: str
    kernels: str
    """"native", or "XLA's"."""
    processor: str
    instructions: str
    caches: str

    @property
    def machine(self) -> tuple[str, str, str, str]:
        """The conditions that are not versions."""
        return self.kernels, self.processor, self.instructions, self.caches


@dataclasses.dataclass(frozen=True)
class Reference:
    """The fingerprints of the trainings, by name, under some conditions."""

    conditions: Conditions
    build: str | None
    """The build of the native kernels."""
    fingerprints: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class References:
    """All references of this release of Unisono."""

    bits: int
    """The number of the engine's bits. It is raised when a change of the engine moves them, and stands in the changelog."""
    entries: Sequence[Reference]

    def find(self, conditions: Conditions) -> Reference | None:
        """Find the reference of these conditions; None if there is none."""
        return next((entry for entry in self.entries if entry.conditions == conditions), None)

    def replace(self, new: Reference) -> References:
        """Add a reference, in place of one of the same conditions."""
        others = [entry for entry in self.entries if entry.conditions != new.conditions]
        return References(self.bits, sorted([*others, new], key=lambda entry: dataclasses.astuple(entry.conditions)))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


def read_references(file: pathlib.Path = FILE) -> References:
    """Read the references of a file."""
    record = json.loads(file.read_text())
    entries = [Reference(Conditions(**entry["conditions"]), entry["build"], entry["fingerprints"]) for entry in record["entries"]]
    return References(record["bits"], entries)


def format_versions(references: References) -> str:
    """Format a table of versions for each machine. Pairs of versions have the same letter if all their fingerprints are equal."""
    lines = [
        f"Versions with the same bits: equal letters stand for equal fingerprints of {count_trainings(references)} small trainings "
        f"(bits {references.bits} of Unisono).",
    ]
    entries = sorted(references.entries, key=lambda entry: entry.conditions.machine)
    for (kernels, processor, instructions, caches), group in itertools.groupby(entries, lambda entry: entry.conditions.machine):
        widest = "AVX-512" if "avx512f" in instructions.split() else "AVX2" if "avx2" in instructions.split() else "no AVX2"
        lines += ["", f"{kernels} kernels on {processor} with {widest}, caches {caches}"]
        lines += format_rows(list(group))
    return "\n".join(lines)


def format_rows(entries: Sequence[Reference]) -> list[str]:
    """Format the rows of one machine, the oldest versions first."""
    letters: dict[tuple[tuple[str, str], ...], str] = {}
    rows = [f"  {'keras':<10}{'jax':<10}bits"]
    first = entries[0].fingerprints
    for entry in entries:
        bits = tuple(sorted(entry.fingerprints.items()))
        letter = letters.setdefault(bits, chr(ord("A") + len(letters)))
        differing = [name for name, value in entry.fingerprints.items() if first.get(name) != value]
        all_or_some = "all trainings" if len(differing) == len(first) else ", ".join(differing)
        other = f"  other than A in {all_or_some}" * bool(differing)
        rows.append(f"  {entry.conditions.keras:<10}{entry.conditions.jax:<10}{letter}{other}")
    return rows


def count_trainings(references: References) -> int:
    return max((len(entry.fingerprints) for entry in references.entries), default=0)
