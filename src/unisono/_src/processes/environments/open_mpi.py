"""The variables of Open MPI's `mpirun`."""

from __future__ import annotations

from collections.abc import Mapping

from unisono._src.processes.description import Cluster
from unisono._src.processes.environments.environment import Environment, read_number

PROCESSES = "OMPI_COMM_WORLD_SIZE"
PROCESS = "OMPI_COMM_WORLD_RANK"


def describe_by_open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    """Describe the cluster by Open MPI's variables; None if they are unset. JAX finds the address."""
    if not environment.get(PROCESSES) or not environment.get(PROCESS):
        return None
    return Cluster(None, read_number(environment, PROCESSES), read_number(environment, PROCESS), "Open MPI")


ENVIRONMENT = Environment("Open MPI", (PROCESSES, PROCESS), describe_by_open_mpi)
