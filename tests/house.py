"""The house, read from the imports: its rooms, its floors, and the drawing of them in docs/architecture.md.

python tests/house.py prints the drawing.
"""

from __future__ import annotations

import ast
import collections
import pathlib

import unisono

ROOT = pathlib.Path(unisono.__file__).parent / "_src"

FLOORS = {
    "commands and files": ["callbacks", "tensorboard", "export", "cli", "doctor", "audit", "replay"],
    "what users hold": ["strategy"],
    "ways to train": ["loop", "fit", "checks.user_code", "distributed"],
    "one step": ["record", "observers", "step", "checks"],
    "what a step is made of": ["replica", "phases", "exchange", "checkpoint", "cluster"],
    "what runs and what is read": ["xla", "data"],
    "what processes say": ["processes", "fingerprint", "ownership"],
    "ground": [
        "keras_private", "jax_private", "digest", "native", "placement", "device_mesh", "reduction_tree", "packing", "versions", "step_count",
        "execution_mode", "hidden_frames", "near_names", "function_names", "library_arrays", "old_objects", "operands",
        "inlining", "marks", "program_digest", "whole_batch", "typed_jax", "typing",
    ],
}  # fmt: skip
"""From the top down. A room imports from its own floor and from the floors below."""

NOT_DRAWN = {"typed_jax", "typing"}
"""Rooms that every other one imports from."""


def room_of(module: list[str]) -> str:
    """Return the room of a module, given by its path below `unisono._src`."""
    return ".".join(module[:2]) if module[:2] == ["checks", "user_code"] else module[0]


def imports_of(path: pathlib.Path) -> set[str]:
    """Return the rooms that a file imports from: inside functions and under TYPE_CHECKING too."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {room_of(name.split(".")[2:]) for name in names if name.startswith("unisono._src.")}
    return rooms


def imports_of_rooms() -> dict[str, dict[str, list[str]]]:
    """Return, for each room, the other rooms that it imports from, with its files that do so."""
    edges: dict[str, dict[str, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in sorted(ROOT.rglob("*.py")):
        module = list(path.relative_to(ROOT).with_suffix("").parts)
        room = room_of(module)
        if room != "__init__":
            for imported in imports_of(path) - {room}:
                edges[room][imported].append("/".join(module))
    return edges


def drawing() -> str:
    """Return the floors from the top down: a line for each room, with what it imports from."""
    edges = imports_of_rooms()
    lines = []
    for floor, rooms in FLOORS.items():
        lines.append(floor)
        for room in rooms:
            imported = sorted(edges[room].keys() - NOT_DRAWN)
            lines.append(f"    {room:17} {'<- ' if imported else ''}{' '.join(imported)}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    print(drawing())
