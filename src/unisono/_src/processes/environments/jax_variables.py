"""The variables that Kubeflow's JAX runtime sets. JAX itself reads the address alone."""

from __future__ import annotations

from collections.abc import Mapping

from unisono._src.processes.description import Cluster
from unisono._src.processes.environments.environment import ADDRESS, Environment, are_all_set, read_number

PROCESSES = "JAX_NUM_PROCESSES"
PROCESS = "JAX_PROCESS_ID"
SOURCE = f"the environment ({PROCESSES} and its kin)"


def describe_by_jax(environment: Mapping[str, str]) -> Cluster | None:
    """Describe the cluster by the variables of Kubeflow's JAX runtime.

    None if only the address is set, or nothing. JAX reads the address beside a cluster that it detects.
    """
    if not environment.get(PROCESSES) and not environment.get(PROCESS):
        return None
    if environment.get(PROCESSES) and read_number(environment, PROCESSES) == 1:
        return Cluster(None, 1, 0, SOURCE)
    are_all_set(environment, (ADDRESS, PROCESSES, PROCESS), "Kubeflow's JAX runtime")
    return Cluster(environment[ADDRESS], read_number(environment, PROCESSES), read_number(environment, PROCESS), SOURCE)


ENVIRONMENT = Environment("Kubeflow's JAX runtime", (PROCESSES, PROCESS, ADDRESS), describe_by_jax)
