"""The command `unisono`: one file a subcommand, each thin and over the public API."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro

from unisono.cli import demo
from unisono.cli.errors import CommandError

SUBCOMMANDS = (demo.demo,)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the subcommand that `args`, by default the command line, names, and exits with its code.

    Args:
        args: The words after `unisono`.

    Example:
        >>> main(["demo", "--epochs", "5"])  # doctest: +SKIP
    """
    app = tyro.extras.SubcommandApp()
    for subcommand in SUBCOMMANDS:
        app.command(subcommand)
    try:
        code = app.cli(prog="unisono", description="Trains Keras models on JAX with the same bits on every placement.", args=args)
    except CommandError as error:
        print(f"unisono: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)
