"""`unisono launch`: a program in several processes on this machine."""

from __future__ import annotations

import os
from typing import Annotated

import tyro

from unisono._src.processes import names
from unisono._src.processes.launch.launch import LaunchSettings, run_with_restarts
from unisono._src.processes.launch.target import check_program
from unisono._src.processes.launch.worker_environment import WorkerDevices, list_gpus
from unisono._src.tools.cli.output import CommandError, check_counts

FLAGS = ("--cpu", "--no-cpu", "-h", "--help")


def launch(
    program: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PROGRAM ...", help_behavior_hint="(required)")
    ] = (),
    *,
    processes: int,
    devices_per_process: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all GPUs, divided)")
    ] = None,
    restarts: int = 0,
    min_processes: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: start all again)")] = None,
    cpu: bool = False,
    bound: float = names.DEFAULT_BOUND,
) -> int:
    """Runs a program in several processes on this machine, as one training.

    For example: unisono launch --processes 4 --restarts 3 train.py --epochs 10

    Options of the launcher stand before the program, and options of the program after it. Each line of output begins with the
    number of its process. Signals reach all processes. If one fails, the others end, its traceback is printed last, and the
    exit code is its own. The processes talk over loopback alone.

    Args:
        program: A script and its arguments, or -m, a module and its arguments.
        processes: The number of processes.
        devices_per_process: GPUs of each process, or CPU devices if there is no GPU.
        restarts: How often the program is started again after a failure. It resumes from its last checkpoint.
        min_processes: After a failure, continue with the processes that are left, if they are at least this many.
        cpu: Run on CPU, even if there are GPUs.
        bound: Seconds within which a lost process is noticed and the others end.
    """
    check_counts(processes=processes, devices_per_process=devices_per_process, min_processes=min_processes)
    if restarts < 0:
        raise CommandError(f"--restarts must be 0 or more; received {restarts}.")
    if not 0 < bound < float("inf"):
        raise CommandError(f"--bound is a number of seconds above 0; received {bound:g}.")
    if min_processes is not None and min_processes > processes:
        raise CommandError(f"--min-processes {min_processes} is more than --processes {processes}.")
    devices = WorkerDevices(devices_per_process, cpu, () if cpu else list_gpus(os.environ))
    try:
        check_program(program)
        devices.make_variables(0, processes)  # refuses too few GPUs
    except ValueError as error:
        raise CommandError(str(error)) from error
    return run_with_restarts(LaunchSettings(program, devices, bound), processes, restarts, min_processes)
