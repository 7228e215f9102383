"""The variables of Slurm's `srun`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from unisono._src.processes.description import Cluster
from unisono._src.processes.environments.environment import Environment, choose_local_devices, find_address, read_number

PROCESSES = "SLURM_NTASKS"
PROCESS = "SLURM_PROCID"
STEP_PROCESSES = "SLURM_STEP_NUM_TASKS"
STEP_NODES = "SLURM_STEP_NUM_NODES"
STEP = "SLURM_STEP_ID"
JOB = "SLURM_JOB_ID"
NODES = "SLURM_STEP_NODELIST"
LOCAL = "SLURM_LOCALID"
OF_A_STEP = (JOB, NODES, PROCESSES, PROCESS, LOCAL)
"""An allocation alone (`salloc`, the script of `sbatch`) has no step, and is one process."""

STEPS_APART = 1021
"""Between the ports of two steps of a job, which may share a node. Jobs that do are near one another in number."""


def describe_by_slurm(environment: Mapping[str, str]) -> Cluster | None:
    """Describe the cluster by a step's variables; None outside of a step.

    The shell of an interactive allocation may be a step too. It has one task, while `SLURM_NTASKS` still counts the tasks of the
    allocation.
    """
    if not all(environment.get(name) for name in OF_A_STEP):
        return None
    processes = read_number(environment, STEP_PROCESSES if environment.get(STEP_PROCESSES) else PROCESSES)
    process = read_number(environment, PROCESS)
    if processes == 1:
        return Cluster(None, 1, process, "Slurm")
    step = read_number(environment, STEP) if environment.get(STEP) else 0
    address = find_address(environment, find_first_node(environment[NODES]), read_number(environment, JOB) + STEPS_APART * step)
    devices = choose_local_devices(environment, LOCAL, environment.get(STEP_NODES) == str(processes))
    return Cluster(address, processes, process, "Slurm", devices)


def find_first_node(nodes: str) -> str:
    """Find the first of Slurm's list of nodes, which has task 0.

    >>> find_first_node("gpu[007-015,020],login"), find_first_node("a,b"), find_first_node("rack[1-2]n[01-16]")
    ('gpu007', 'a', 'rack1n01')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^-,\]]+)[^\]]*\]", r"\1", first[0]) if first else nodes


ENVIRONMENT = Environment("Slurm", (PROCESSES, PROCESS, STEP_PROCESSES, STEP_NODES, STEP, *OF_A_STEP), describe_by_slurm)
