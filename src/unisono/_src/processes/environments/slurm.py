"""The variables of Slurm's `srun`."""

from __future__ import annotations

from collections.abc import Mapping

from unisono._src.processes.description import Cluster
from unisono._src.processes.environments.environment import Environment, read_number

PROCESSES = "SLURM_NTASKS"
PROCESS = "SLURM_PROCID"
STEP_PROCESSES = "SLURM_STEP_NUM_TASKS"
STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", PROCESSES, PROCESS, "SLURM_LOCALID")
"""What JAX reads. An allocation alone (`salloc`, the script of `sbatch`) has no step, and is one process."""


def describe_by_slurm(environment: Mapping[str, str]) -> Cluster | None:
    """Describe the cluster by a step's variables; None outside of a step.

    JAX finds the address. The shell of an interactive allocation may be a step too. It has one task, while `SLURM_NTASKS` still counts the
    tasks of the allocation.
    """
    if not all(environment.get(name) for name in STEP):
        return None
    processes = read_number(environment, STEP_PROCESSES if environment.get(STEP_PROCESSES) else PROCESSES)
    return Cluster(None, processes, read_number(environment, PROCESS), "Slurm")


ENVIRONMENT = Environment("Slurm", (PROCESSES, PROCESS, STEP_PROCESSES, *STEP), describe_by_slurm)
