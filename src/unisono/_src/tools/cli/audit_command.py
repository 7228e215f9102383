"""`unisono audit`: runs a script on several placements, and compares the bits."""

from __future__ import annotations

import pathlib
import sys
import tempfile
from typing import TYPE_CHECKING, Annotated

import tyro

from unisono._src.tools.cli.output import DIFFERENT, EQUAL, CommandError, check_counts, output_report
from unisono._src.tools.cli.words import check_script_words, read_counts

if TYPE_CHECKING:
    from unisono._src.tools.audit.audit import AuditSettings
    from unisono._src.tools.audit.audit_report import AuditReport

FLAGS = ("-h", "--help")


def audit(
    program: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PROGRAM ...", help_behavior_hint="(required)")
    ] = (),
    *,
    steps: int = 20,
    devices: Annotated[str, tyro.conf.arg(metavar="INT,INT", help_behavior_hint="(default: 1, 2 and R)")] = "",
    processes: Annotated[str, tyro.conf.arg(metavar="INT,INT", help_behavior_hint="(default: 2, where the strategy can)")] = "",
    against: Annotated[
        pathlib.Path | None, tyro.conf.arg(metavar="DIRECTORY", help_behavior_hint="(default: other placements)")
    ] = None,
    json_file: Annotated[
        pathlib.Path | None, tyro.conf.arg(name="json", metavar="FILE", help_behavior_hint="(default: no file)")
    ] = None,
    html: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: no file)")] = None,
    keep: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="DIRECTORY", help_behavior_hint="(default: none is kept)")] = None,
    limit: float = 1800.0,
) -> int:
    """Runs a training script on several placements, and compares the bits.

    If two runs part, it says where and why.

    For example: unisono audit --steps 50 train.py --epochs 10

    Options of the audit stand before the script, and options of the script after it. All runs have the R of the script as it is written.
    The exit code is 0 if the runs are equal, 1 if they differ, and 2 if they cannot be compared.

    Args:
        program: A script and its arguments, or -m, a module and its arguments.
        steps: The steps of each run that are compared. A run ends after them.
        devices: Numbers of devices to run on, as in 1,2,8. R counts up to 8.
        processes: Numbers of processes to run in, for scripts with a MultiWorkerMirroredStrategy.
        against: The directory of a record, by UNISONO_RECORD or un.callbacks.Record, to compare one run with.
        json_file: A file for the report in JSON; "-" writes it in place of the table.
        html: A file for the report as one HTML page, which opens without a network.
        keep: A directory that does not exist yet, for the records of the runs.
        limit: The seconds after which a run is killed.
    """
    check_counts(steps=steps)
    check_script_words("audit", program)
    numbers = read_counts("devices", devices), read_counts("processes", processes)
    # This imports JAX, which takes seconds: wrong words are refused before.
    from unisono._src.tools.audit.audit import AuditSettings

    report = run_audit(AuditSettings(program, steps, *numbers, against, limit), keep)
    write_report(report, json_file, html)
    return EQUAL if report.equal else DIFFERENT


def run_audit(settings: AuditSettings, keep: pathlib.Path | None) -> AuditReport:
    """Run an audit. Its records are written to `keep`, or else to a directory that is removed."""
    with tempfile.TemporaryDirectory(prefix="unisono-audit-") as temporary:
        folder = make_folder(keep) if keep else pathlib.Path(temporary)
        from unisono._src.tools.audit.audit import AuditError, audit_script
        from unisono._src.tools.audit.script_run import LimitError

        try:
            return audit_script(settings, folder, lambda name: print(f"running: {name}", file=sys.stderr, flush=True))
        except (AuditError, LimitError, FileNotFoundError) as error:
            raise CommandError(str(error)) from error


def write_report(report: AuditReport, json_file: pathlib.Path | None, html: pathlib.Path | None) -> None:
    """Write the report's files, and print the table. If the JSON's file is "-", the JSON is printed in place of the table."""
    from unisono._src.tools.audit.audit_report import format_report

    if html is not None:
        from unisono._src.tools.audit.html_report import render_report

        html.write_text(render_report(report), encoding="utf-8")
    output_report(format_report(report), report.to_json(), json_file)


def make_folder(path: pathlib.Path) -> pathlib.Path:
    """Make the directory of the records. One that is there is refused: its records would be mixed with these."""
    try:
        path.mkdir(parents=True)
    except FileExistsError as error:
        raise CommandError(f"--keep {path} is there already. Name a directory that does not exist yet.") from error
    return path
