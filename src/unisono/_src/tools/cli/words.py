"""The words of subcommands that run a script: the script, and lists of numbers."""

from __future__ import annotations

import pathlib

from unisono._src.tools.cli.output import CommandError


def read_counts(option: str, text: str) -> tuple[int, ...]:
    """Read the numbers of an option, with commas between them."""
    words = text.split(",") if text else []
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise CommandError(f"--{option} takes whole numbers with commas between them, as in 1,2,8; received {text!r}.")
    return tuple(int(word) for word in words)


def check_script_words(command: str, words: tuple[str, ...]) -> None:
    """Refuse words that name no program."""
    if not words or words == ("-m",):
        raise CommandError(
            f"unisono {command} received no program. Write: unisono {command} script.py, or with a module unisono {command} -m "
            f"package.module"
        )
    if words[0] != "-m" and not pathlib.Path(words[0]).exists():
        raise CommandError(f"there is no script {words[0]!r} here. Options of unisono {command} come before the script's name.")
