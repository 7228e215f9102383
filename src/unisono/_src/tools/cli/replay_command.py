"""`unisono replay`: rebuilds the state before a recorded step, and inspects it."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Sequence
from typing import Annotated

import tyro

from unisono._src.tools.cli.output import DIFFERENT, EQUAL, CommandError, check_counts, output_report

FLAGS = ("--interactive", "--no-interactive", "-h", "--help")


def replay(
    program: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="PROGRAM ...", help_behavior_hint="(default: the recorded one)"),
    ] = (),
    *,
    run: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="DIRECTORY", help_behavior_hint="(required)")] = None,
    step: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the first whose loss is not finite)")
    ] = None,
    devices: int = 1,
    json_file: Annotated[
        pathlib.Path | None, tyro.conf.arg(name="json", metavar="FILE", help_behavior_hint="(default: no file)")
    ] = None,
    interactive: bool = False,
) -> int:
    """Runs a recorded training again up to one step, and shows it.

    All bits must be those of the record. The step is shown by replica: rows, loss, norms of gradients, and the first value that is not
    finite.

    For example: unisono replay train.py --run run --step 1200

    The training goes on from the last checkpoint before the step that the script finds. One device is enough, however many the recorded run
    had. The exit code is 0 if all bits are equal, 1 if not, and 2 if the step cannot be replayed.

    Args:
        program: The script of the recorded run, or -m and a module. Its arguments are those of the recorded run; others follow after --.
        run: The directory of the record, by UNISONO_RECORD or un.callbacks.Record.
        step: The step, counted from 1 over the whole run.
        devices: The number of devices to run on.
        json_file: A file for the report in JSON; "-" writes it in place of the table.
        interactive: Open a prompt with the state before the step is run.
    """
    check_counts(step=step, devices=devices)
    if run is None:
        raise CommandError("unisono replay received no record. Write: unisono replay script.py --run DIRECTORY --step N")
    # These import JAX, which takes seconds: wrong words are refused before.
    from unisono._src.tools.replay.replay import ReplayError, ReplaySettings, replay_script
    from unisono._src.tools.replay.replay_report import format_replay

    with tempfile.TemporaryDirectory(prefix="unisono-replay-") as folder:
        try:
            report = replay_script(ReplaySettings(program, run, step, devices, interactive), pathlib.Path(folder))
        except (ReplayError, FileNotFoundError) as error:
            raise CommandError(str(error)) from error
    output_report(format_replay(report), report.to_json(), json_file)
    return EQUAL if report.equal else DIFFERENT


def move_script_last(words: Sequence[str]) -> list[str]:
    """Move the script behind the options. It may come first, with its arguments behind "--"."""
    if not words or words[0].startswith("-"):
        return list(words)
    end = words.index("--") if "--" in words else len(words)
    return [*words[1:end], "--", words[0], *words[end + 1 :]]
