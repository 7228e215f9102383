"""`unisono launch`: a program in several processes on this machine."""

from __future__ import annotations

import os
from typing import Annotated

import tyro

from unisono._src.cli.errors import CommandError, check_counts
from unisono._src.cluster.launch.launch import LaunchSettings, run_with_restarts
from unisono._src.cluster.launch.target import check_program
from unisono._src.cluster.launch.worker_environment import WorkerDevices, list_gpus
from unisono._src.processes import names

FLAGS = ("--cpu", "--no-cpu", "-h", "--help")


def launch(
    program: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PROGRAM ...")] = (),
    *,
    processes: int,
    devices_per_process: int | None = None,
    restarts: int = 0,
    min_processes: int | None = None,
    cpu: bool = False,
    bound: float = names.DEFAULT_BOUND,
) -> int:
    """Runs a script, or with -m a module, in several processes of one training on this machine.

    What stands after the script's name is passed on to it. The processes talk over loopback alone. Their output is one, with
    the number of the process in front of each line; signals reach all of them. The exit code is that of the process which failed
    first, and its traceback comes last.

    Args:
        program: script.py and its arguments, or -m, a module and its arguments.
        processes: How many.
        devices_per_process: GPUs of each process, or CPU devices where there is no GPU; by default all GPUs are divided.
        restarts: How often the program is started again after a failure; it goes on from what it has saved.
        min_processes: After a failure, go on with the processes that are left, and never with fewer than these. By default all
            are started again.
        cpu: Run on CPU where there is a GPU too.
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
