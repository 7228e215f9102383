"""The house, read from the imports: its packages and rooms, and the drawing of them in docs/architecture.md.

python tests/helpers/house.py prints the drawing.
"""

from __future__ import annotations

import ast
import collections
import functools
import pathlib
from typing import NamedTuple

import unisono

ROOT = pathlib.Path(unisono.__file__).parent / "_src"


class Package(NamedTuple):
    """What a package may import, of the house and of libraries."""

    rooms: list[str]
    """From the top down, but for the files of the package itself, which stand in its own name."""
    packages: frozenset[str]
    libraries: frozenset[str]


LOWER = ["ground", "programs", "kernels", "processes", "engine", "keras", "tools"]
"""From the bottom up. A package may import from those below."""

PACKAGES = {
    "tools": Package(
        ["tools.cli", "tools.audit", "tools.replay", "tools", "tools.memory", "tools.doctor", "tools.export", "tools.ray", "tools.tensorboard"],
        frozenset(LOWER[:6]), frozenset({"keras", "jax"}),
    ),
    "keras": Package(
        ["keras.strategy", "keras.memory", "keras.loop", "keras.callbacks", "keras.fit", "keras.steps", "keras.record", "keras.checkpoint",
         "keras.checks.user_code", "keras.distributed", "keras.checks", "keras.replica", "keras.data", "keras", "keras.private"],
        frozenset(LOWER[:5]), frozenset({"keras", "jax"}),
    ),
    "engine": Package(
        ["engine.observers", "engine.step", "engine.exchange", "engine.phases", "engine.xla", "engine"],
        frozenset(LOWER[:4]), frozenset({"jax"}),
    ),
    "processes": Package(
        ["processes.launch", "processes.watch", "processes.environments", "processes"], frozenset(LOWER[:2]), frozenset({"jax"})
    ),
    "kernels": Package(
        ["kernels", "kernels.convolution", "kernels.loops", "kernels.layers", "kernels.products", "kernels.native"],
        frozenset(LOWER[:2]), frozenset({"jax"}),
    ),
    "programs": Package(["programs", "programs.private"], frozenset(LOWER[:1]), frozenset({"jax"})),
    "ground": Package(["ground"], frozenset(), frozenset({"jax"})),
}  # fmt: skip
"""From the top down."""

NOT_DRAWN = {"ground"}
"""What every other room imports from."""


def room_of(module: list[str]) -> str:
    """Return the room of a module, given by its path below `unisono._src`."""
    if module[0] not in PACKAGES:
        return "ground"
    depth = 3 if module[:3] == ["keras", "checks", "user_code"] else 2
    return ".".join(module[:depth]) if ROOT.joinpath(*module[:depth]).is_dir() and len(module) >= depth else module[0]


@functools.cache
def imports_of(path: pathlib.Path) -> set[str]:
    """Return the modules that a file imports, by their full names: inside functions and under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def libraries_of(package: str) -> dict[str, set[str]]:
    """Return, for each file of a package, which of Keras and JAX it imports."""
    files = ROOT.glob("*.py") if package == "ground" else (ROOT / package).rglob("*.py")
    return {str(path.relative_to(ROOT)): {name.split(".")[0] for name in imports_of(path)} & {"keras", "jax"} for path in files}


@functools.cache
def imports_of_rooms() -> dict[str, dict[str, list[str]]]:
    """Return, for each room, the other rooms that it imports from, with its files that do so."""
    edges: dict[str, dict[str, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in sorted(ROOT.rglob("*.py")):
        module = list(path.relative_to(ROOT).with_suffix("").parts)
        room = room_of(module)
        below = {
            name.split(".")[2:] and room_of(name.split(".")[2:]) for name in imports_of(path) if name.startswith("unisono._src.")
        }
        for imported in below - {room}:
            edges[room][imported].append("/".join(module))
    return edges


def drawing() -> str:
    """Return the packages from the top down: a line for each room, with what it imports from."""
    edges = imports_of_rooms()
    lines = []
    for name, package in list(PACKAGES.items())[:-1]:  # the files beside the packages are no room
        lines.append(name)
        for room in package.rooms:
            imported = sorted(edges[room].keys() - NOT_DRAWN)
            lines.append(f"    {room:22} {'<- ' if imported else ''}{' '.join(imported)}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    print(drawing())
