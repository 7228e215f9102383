"""The writing of an export, as a whole or not at all. It is written beside its path first."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

CHECKPOINT_NAME = "stablehlo"
"""The name of the checkpoint inside an export as StableHLO."""


def check_overwrite(path: Path, overwrite: bool) -> None:
    """Refuse a path that exists, unless an export is to be replaced. Called before anything is computed."""
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists. Write overwrite=True to replace the export there, or another path.")
    if not (is_stablehlo(path) or is_saved_model(path) or (path.is_file() and path.suffix == ".onnx")):
        raise FileExistsError(
            f"{path} exists and is no export: overwrite=True replaces exports alone (StableHLO, SavedModel, .onnx). Move it away, or write "
            f"another path."
        )


def is_stablehlo(path: Path) -> bool:
    return (path / f"{CHECKPOINT_NAME}_1").is_dir()


def is_saved_model(path: Path) -> bool:
    return (path / "saved_model.pb").is_file()


def write_atomically(path: Path, overwrite: bool, write: Callable[[Path], None]) -> None:
    """Write beside the path, then move the result there. `write` gets a path of the same name in a new folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.unfinished-", dir=path.parent))
    try:
        inside = folder / "new"
        inside.mkdir()
        write(inside / path.name)
        check_overwrite(path, overwrite)
        for source in inside.iterdir():  # an ONNX file may have its weights beside it
            target = path.parent / source.name
            if target.exists():
                target.rename(folder / f"old {target.name}")
            source.rename(target)
    finally:
        shutil.rmtree(folder)
