"""The variables of Open MPI's `mpirun`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from unisono._src.processes.description import Cluster
from unisono._src.processes.environments.environment import (
    ADDRESS,
    Environment,
    choose_local_devices,
    find_address,
    read_number,
)

PROCESSES = "OMPI_COMM_WORLD_SIZE"
PROCESS = "OMPI_COMM_WORLD_RANK"
LOCAL = "OMPI_COMM_WORLD_LOCAL_RANK"
LOCAL_PROCESSES = "OMPI_COMM_WORLD_LOCAL_SIZE"
LAUNCHER = "OMPI_MCA_orte_hnp_uri"
"""Where `mpirun` listens, and the number of its job. Open MPI 5 does not say it."""

JOBS_APART = 2**12
"""The numbers of jobs are multiples of it."""


def describe_by_open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    """Describe the cluster by Open MPI's variables; None if they are unset.

    Process 0 is on the machine of `mpirun`, unless JAX's variable names another one.
    """
    if not environment.get(PROCESSES) or not environment.get(PROCESS):
        return None
    processes, process = read_number(environment, PROCESSES), read_number(environment, PROCESS)
    if processes == 1:
        return Cluster(None, 1, process, "Open MPI")
    job, host = find_launcher(environment.get(LAUNCHER, ""))
    address = find_address(environment, host, job) if host else environment.get(ADDRESS)
    devices = choose_local_devices(environment, LOCAL, environment.get(LOCAL_PROCESSES) == "1")
    return Cluster(address or None, processes, process, "Open MPI", devices)


def find_launcher(uri: str) -> tuple[int, str]:
    """Find the number of the job and the first address of `mpirun`; an empty address if there is none.

    >>> find_launcher("8192.0;tcp://10.0.0.1,10.1.0.1:34911;tcp6://[fd00::2]:51919"), find_launcher("4096.0;tcp6://[fd00::2,fd01::2]:51919")
    ((2, '10.0.0.1'), (1, 'fd00::2'))
    """
    found = re.match(r"(\d+)\..*?;tcp(?:://([^,:]+)|6://\[([^,\]]+))", uri)
    return (int(found[1]) // JOBS_APART, found[2] or found[3]) if found else (0, "")


ENVIRONMENT = Environment("Open MPI", (PROCESSES, PROCESS, LOCAL, LOCAL_PROCESSES, LAUNCHER), describe_by_open_mpi)
