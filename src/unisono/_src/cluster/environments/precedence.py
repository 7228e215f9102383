"""The environments in their order: whose words hold where several describe the processes."""

from __future__ import annotations

from collections.abc import Mapping

from unisono._src.cluster.description import Cluster, ClusterError
from unisono._src.cluster.environments import (
    jax_variables,
    keras_distribution,
    open_mpi,
    skypilot,
    slurm,
    tf_config,
    torchrun,
    unisono_launch,
)
from unisono._src.cluster.environments.environment import Environment

AGREEING = (
    unisono_launch.ENVIRONMENT,
    tf_config.ENVIRONMENT,
    keras_distribution.ENVIRONMENT,
    jax_variables.ENVIRONMENT,
    torchrun.ENVIRONMENT,
)
"""What describes the processes of this program. Where several do, they must agree."""

AROUND = (open_mpi.ENVIRONMENT, slurm.ENVIRONMENT, skypilot.ENVIRONMENT)
"""What may have started another launcher, once on each node, in place of the program: the first one holds, and only where all above say
nothing. `mpirun` starts its own helpers by `srun`, and both run inside of a task of SkyPilot."""

AGREEING_VARIABLES = tuple(name for environment in AGREEING for name in environment.variables)


def require_same_cluster(descriptions: list[Cluster | None]) -> Cluster | None:
    """Return the first cluster of those that are described, and refuse others that differ from it; None where there is none."""
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
    """Return the cluster as the program's arguments and the agreeing environments describe it; None where all say nothing."""
    return require_same_cluster([given, *(environment.describe(variables) for environment in AGREEING)])


def describe_by_first(variables: Mapping[str, str]) -> tuple[Environment, Cluster] | None:
    """Return the first environment that describes the processes, with its cluster; None where all say nothing."""
    return find_first((*AGREEING, *AROUND), variables)


def describe_by_around(variables: Mapping[str, str]) -> Cluster | None:
    """Return the cluster as the first of the environments describes it that may be around another one; None where all say nothing."""
    found = find_first(AROUND, variables)
    return found and found[1]


def find_first(environments: tuple[Environment, ...], variables: Mapping[str, str]) -> tuple[Environment, Cluster] | None:
    for environment in environments:
        cluster = environment.describe(variables)
        if cluster is not None:
            return environment, cluster
    return None
