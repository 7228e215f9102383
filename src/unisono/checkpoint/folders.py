"""Which folders of a directory are checkpoints: by their names, and by what Orbax leaves in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint.experimental.v1 as ocp

ARRAYS = "arrays"
METADATA = "_CHECKPOINT_METADATA"


def found_in(directory: Path, name: str | None = None) -> list[tuple[str, int, Path]]:
    """(name, number, path) of what was a whole checkpoint once, though some of it may be gone by now.

    All folders of a name count where one of them looks like a checkpoint, and those of the name that is given.
    """
    matches = [(re.fullmatch(r"(.+)_(\d+)", entry.name), entry) for entry in directory.iterdir()] if directory.is_dir() else []
    named = [(match[1], int(match[2]), entry) for match, entry in matches if match and entry.is_dir()]
    ours = {of for of, _, entry in named if any((entry / part).exists() for part in (METADATA, ARRAYS))} | {name}
    return [found for found in named if found[0] in ours]


class Counted(ocp.path.step.NameFormat):
    """What Orbax knows of a directory: the checkpoints of one name that count.

    Others stay where they are. Orbax would take them for kept ones, and save nothing where the metadata of one are gone.
    """

    def __init__(self, name: str, counts: Callable[[int], bool]) -> None:
        self._name = name
        self._counts = counts
        self._standard = ocp.path.step.standard_name_format(step_prefix=name)

    def build_name(self, step: int) -> str:
        return self._standard.build_name(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        for name, number, path in found_in(Path(base_path), self._name):
            if name == self._name and (path / METADATA).exists() and self._counts(number):
                yield self.find_step(base_path, number)

    def find_step(self, base_path: Any, step: int) -> Any:
        return self._standard.find_step(base_path, step)
