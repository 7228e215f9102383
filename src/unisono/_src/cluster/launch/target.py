"""The program that is launched: a script or a module with its arguments."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Sequence

SAVING = ("BackupAndRestore", "Checkpoint(")
"""Words of which a script that saves its training has one. Keras' ModelCheckpoint( contains the second."""


def check_program(words: Sequence[str]) -> None:
    """Refuse words that name no program. They stand behind the options of `unisono launch`, as on Python's own command line."""
    if not words or list(words) == ["-m"]:
        raise ValueError(
            "unisono launch received no program. Write: unisono launch --processes 2 script.py, or with a module "
            "unisono launch --processes 2 -m package.module"
        )
    if words[0] != "-m" and not pathlib.Path(words[0]).exists():
        raise ValueError(f"there is no script {words[0]!r} here. Options of unisono launch come before the script's name.")


def seems_to_save(words: Sequence[str]) -> bool:
    """Return whether the source of the program names something that saves. Its imports are not read. The answer is True where the source
    cannot be read."""
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
    """Return the launcher's own options, and the program with everything that belongs to it.

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
