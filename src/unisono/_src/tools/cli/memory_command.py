"""`unisono memory`: runs a script up to its first step, and tells the memory of its training."""

from __future__ import annotations

import json as json_text
from typing import Annotated

import tyro

from unisono._src.tools.cli.output import CommandError
from unisono._src.tools.cli.words import check_script_words, read_counts

FLAGS = ("--json", "--no-json", "-h", "--help")


def memory(
    program: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PROGRAM ...", help_behavior_hint="(required)")
    ] = (),
    *,
    replicas: Annotated[
        str, tyro.conf.arg(metavar="INT,INT", help_behavior_hint="(default: the strategy's R, its half and its double)")
    ] = "",
    json: bool = False,
) -> int:
    """Says how much memory a training script needs on each device.

    The script runs up to the first step of its first fit or train_on_batch, and ends there: nothing is trained.

    For example: unisono memory --replicas 1,4,16 train.py --epochs 10

    Options of this command stand before the script, and options of the script after it. What the script prints goes to the standard error.

    Args:
        program: A script and its arguments, or -m, a module and its arguments.
        replicas: Numbers of replicas to tell the memory for.
        json: Print one JSON object in bytes, for programs.
    """
    check_script_words("memory", program)
    counts = read_counts("replicas", replicas)
    from unisono._src.tools.memory import ScriptError, ask_script

    try:
        report = ask_script(program, counts)
    except ScriptError as error:
        raise CommandError(str(error)) from error
    print(json_text.dumps(report["report"], indent=2) if json else report["table"])
    return 0
