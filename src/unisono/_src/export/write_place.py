"""Where an export is written: beside its place first, so that it is there as a whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

NAME = "stablehlo"
"""Of the checkpoint inside an export as StableHLO."""


def check(path: Path, overwrite: bool) -> None:
    """Before anything is computed."""
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists. Write overwrite=True to replace the export there, or another path.")
    if not is_export(path):
        raise FileExistsError(
            f"{path} exists and is no export: overwrite=True replaces exports alone (StableHLO, SavedModel, .onnx). Move it away, or write "
            f"another path."
        )


def is_export(path: Path) -> bool:
    return is_stablehlo(path) or is_saved_model(path) or (path.is_file() and path.suffix == ".onnx")


def is_stablehlo(path: Path) -> bool:
    return (path / f"{NAME}_1").is_dir()


def is_saved_model(path: Path) -> bool:
    return (path / "saved_model.pb").is_file()


def written(path: Path, overwrite: bool, write: Callable[[Path], None]) -> None:
    """Calls `write` with a path of the same name in a new room beside it, and moves what is there then to its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=f".{path.name}.unfinished-", dir=path.parent))
    try:
        inside = room / "new"
        inside.mkdir()
        write(inside / path.name)
        check(path, overwrite)
        for made in inside.iterdir():  # an ONNX file may have its weights beside it
            moved(made, path.parent / made.name, room)
    finally:
        shutil.rmtree(room)


def moved(made: Path, to: Path, room: Path) -> None:
    if to.exists():
        os.rename(to, room / f"old {to.name}")
    os.rename(made, to)
