"""The command `unisono`: one thin file a subcommand, over the public API."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro

from unisono._src.processes.launch.target import split_command_line
from unisono._src.tools.cli import audit_command, doctor_command, launch_command, memory_command, replay_command
from unisono._src.tools.cli.completion import make_completion
from unisono._src.tools.cli.output import CommandError
from unisono._src.versions import VERSION

DESCRIPTION = """Trains Keras models on JAX with the same bits on every placement.

unisono COMMAND --help describes a subcommand; unisono --version prints the version."""

FLAGS = {
    "launch": launch_command.FLAGS,
    "audit": audit_command.FLAGS,
    "replay": replay_command.FLAGS,
    "memory": memory_command.FLAGS,
}
"""The options without a value of the subcommands that run a program. The program's own options are not read here."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the subcommand that `args` names, and exit with its code.

    By default `args` is the command line.

    Args:
        args: The words after `unisono`.

    Example:
        >>> main(["demo", "--epochs", "5"])  # doctest: +SKIP
    """
    words = list(sys.argv[1:] if args is None else args)
    if words == ["--version"]:
        print(f"unisono {VERSION}")
        sys.exit()
    subcommand = words[0] if words else ""
    if subcommand == "replay":
        words[1:] = replay_command.move_script_last(words[1:])
    if subcommand in FLAGS:
        options, program = split_command_line(words[1:], FLAGS[subcommand])
        words[1:] = [*options, *(["--", *program] if program else [])]
    app = tyro.extras.SubcommandApp()
    app.command(launch_command.launch)
    app.command(doctor_command.doctor)
    app.command(audit_command.audit)
    app.command(replay_command.replay)
    app.command(memory_command.memory)
    if subcommand not in (*FLAGS, "doctor"):  # these start at once: the other subcommands import Keras
        from unisono._src.tools.cli import demo

        app.command(demo.demo)
        app.command(make_completion(app))
    try:
        code = app.cli(prog="unisono", description=DESCRIPTION, args=words)
    except CommandError as error:
        print(f"unisono: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)
