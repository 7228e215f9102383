"""The order of the environments, for processes that several of them describe."""

from __future__ import annotations

from collections.abc import Mapping

from unisono._src.processes.description import Cluster, ClusterError
from unisono._src.processes.environments import (
    jax_variables,
    keras_distribution,
    open_mpi,
    skypilot,
    slurm,
    tf_config,
    torchrun,
    unisono_launch,
)
from unisono._src.processes.environments.environment import Environment

AGREEING = (
    unisono_launch.ENVIRONMENT,
    tf_config.ENVIRONMENT,
    keras_distribution.ENVIRONMENT,
    jax_variables.ENVIRONMENT,
    torchrun.ENVIRONMENT,
)
"""Environments that describe the processes of this program. If several do, they must agree."""

AROUND = (open_mpi.ENVIRONMENT, slurm.ENVIRONMENT, skypilot.ENVIRONMENT)
"""Environments of another launcher, which may have started one on each node in place of the program. The first one holds, and only if none
above describes a cluster. `mpirun` starts its own helpers by `srun`, and both run inside of a task of SkyPilot."""

AGREEING_VARIABLES = tuple(name for environment in AGREEING for name in environment.variables)


def require_same_cluster(descriptions: list[Cluster | None]) -> Cluster | None:
    """Require that all descriptions agree, and take the first. None if there is none."""
    clusters = [cluster for cluster in descriptions if cluster is not None]
    for other in clusters[1:]:
        first = clusters[0]
        if (first.processes, first.process) != (other.processes, other.process):
            raise ClusterError(
                f"{first.source} said process {first.process} of {first.processes}, and {other.source} process {other.process} of "
                f"{other.processes}. Leave one of them out."
            )
    return clusters[0] if clusters else None


def describe_by_agreeing(variables: Mapping[str, str], given: Cluster | None = None) -> Cluster | None:
    """Describe the cluster by the program's arguments and the agreeing environments. None if there is no description."""
    return require_same_cluster([given, *(environment.describe(variables) for environment in AGREEING)])


def describe_by_first(variables: Mapping[str, str]) -> tuple[Environment, Cluster] | None:
    """Find the first environment that describes the processes, and its cluster. None if there is none."""
    return find_first((*AGREEING, *AROUND), variables)


def describe_by_around(variables: Mapping[str, str]) -> Cluster | None:
    """Describe the cluster by the first environment around this one. None if there is none."""
    found = find_first(AROUND, variables)
    return found and found[1]


def find_first(environments: tuple[Environment, ...], variables: Mapping[str, str]) -> tuple[Environment, Cluster] | None:
    for environment in environments:
        cluster = environment.describe(variables)
        if cluster is not None:
            return environment, cluster
    return None
