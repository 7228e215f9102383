"""The launched program: a script or a module, with its arguments."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Sequence

SAVING = ("BackupAndRestore", "Checkpoint(")
"""A script that saves its training has one of these. Keras' ModelCheckpoint( contains the second."""


def check_program(words: Sequence[str]) -> None:
    """Refuse a command line that names no program.

    The program stands behind the options of `unisono launch`, as on Python's own command line.
    """
    if not words or list(words) == ["-m"]:
        raise ValueError(
            "unisono launch received no program. Write: unisono launch --processes 2 script.py, or with a module "
            "unisono launch --processes 2 -m package.module"
        )
    if words[0] != "-m" and not pathlib.Path(words[0]).exists():
        raise ValueError(f"there is no script {words[0]!r} here. Options of unisono launch come before the script's name.")


def seems_to_save(words: Sequence[str]) -> bool:
    """Whether the program's source names something that saves. Its imports are not read. True if the source cannot be read."""
    try:
        source = find_source(words).read_text()
    except (OSError, UnicodeDecodeError, ImportError, ValueError):
        return True
    return any(word in source for word in SAVING)


def find_source(words: Sequence[str]) -> pathlib.Path:
    if words[0] != "-m":
        return pathlib.Path(words[0])
    sys.path.insert(0, "")  # where python -m looks first
    try:
        spec = importlib.util.find_spec(words[1])
    finally:
        sys.path.remove("")
    if spec is None or spec.origin is None:
        raise ImportError(words[1])
    return pathlib.Path(spec.origin)


def split_command_line(words: Sequence[str], flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the launcher's options from the program and its arguments.

    Args:
        words: The words after `unisono launch`.
        flags: Options of the launcher that take no value.

    Example:
        >>> split_command_line(["--processes", "2", "--cpu", "train.py", "--cpu", "--", "x"], ["--cpu"])
        (['--processes', '2', '--cpu'], ['train.py', '--cpu', '--', 'x'])
    """
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "-m":
        if words[index] == "--":
            return list(words[:index]), list(words[index + 1 :])
        index += 1 if words[index] in flags or "=" in words[index] else 2
    return list(words[:index]), list(words[index:])
