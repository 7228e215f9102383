"""What subcommands say: reports with an exit code, and errors."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imports JAX, for which no subcommand waits before it starts other processes
    from unisono._src.typing import Json


class CommandError(Exception):
    """An error that is shown as one message without a traceback."""


def check_counts(advice: str = "", **options: int | None) -> None:
    """Refuse options below 1. None stands for one that was left out; the advice follows the message."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be 1 or more; received {value}.{advice}")


EQUAL = 0
DIFFERENT = 1
"""Exit codes like those of `diff`: 2 says that there was trouble."""


def output_report(table: str, content: Json, json_file: pathlib.Path | None) -> None:
    """Print the table, and write the JSON into its file. If the file is "-", the JSON is printed in place of the table."""
    text = json.dumps(content, indent=2)
    if json_file is not None and str(json_file) != "-":
        json_file.write_text(text + "\n", encoding="utf-8")
    print(text if str(json_file) == "-" else table)
