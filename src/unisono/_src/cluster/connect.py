"""The connection with the other processes through `jax.distributed`, unless the program has made it."""

from __future__ import annotations

import os

import jax

from unisono._src.cluster.arrival import GRACE, check_port, exit_if_late, wait_for_coordinator
from unisono._src.cluster.environments.by_arguments import ClusterArguments
from unisono._src.cluster.environments.by_launcher import LauncherVariables
from unisono._src.cluster.environments.by_tf_config import TFConfig
from unisono._src.cluster.environments.environment import Cluster, ClusterEnvironment, ClusterError
from unisono._src.jax_private import distributed
from unisono._src.jax_private.runtime import has_jax_started
from unisono._src.processes import names

ALONE = Cluster(None, 1, 0, "nobody")
HEARTBEATS = 4
"""The bounds for which JAX waits before it aborts a process that misses another one. The watch, which says more, comes first."""

FEWEST_SECONDS = 100
"""JAX' own default for its heartbeats."""


def connect_processes(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: int = 300,
    bound: float | None = None,
) -> Cluster:
    """Make this process one of several, before JAX starts, and return the cluster.

    The cluster is described by the arguments, by the variables of `unisono launch`, or by TF_CONFIG. Where several describe it, they
    must agree. Where none does, JAX looks for a cluster (Slurm, Open MPI, Kubernetes, TPU pods); where there is none, this is a
    single process, and nothing is done. Where `jax.distributed` is initialized already, it is taken as it is.

    Args:
        coordinator: host:port at which process 0 listens. Only the other processes may be able to reach it.
        processes: The number of processes.
        process: The number of this process, counted from 0.
        timeout: Seconds in which all must have come.
        bound: Seconds of the watch, by default those of the environment. JAX must not be sooner than the watch.
    """
    described = describe_cluster((ClusterArguments(coordinator, processes, process), LauncherVariables(), TFConfig()))
    if jax.distributed.is_initialized():
        initialized = Cluster(
            None, *distributed.get_process_count_and_number(), source="jax.distributed, which is initialized already,"
        )
        return initialized if described is None else require_same_cluster([initialized, described])
    if described is not None and described.processes == 1:
        return described
    if has_jax_started():
        if described is None:
            return ALONE  # as it was when JAX started
        raise ClusterError(
            f"{described.source} said process {described.process} of {described.processes}, but JAX has started already, as a single process. "
            f"Make the strategy in the first lines of the program, behind the imports: arrays, jax.devices() and Keras' optimizers "
            f"start JAX."
        )
    heartbeats = compute_heartbeat_timeout(read_bound(bound))
    return detect_cluster(timeout, heartbeats) if described is None else join_cluster(described, timeout, heartbeats)


def describe_cluster(environments: tuple[ClusterEnvironment, ...]) -> Cluster | None:
    """Return the cluster that the environments describe, by the first that describes one; None where none does."""
    clusters = [cluster for cluster in (environment.describe(os.environ) for environment in environments) if cluster is not None]
    return require_same_cluster(clusters) if clusters else None


def require_same_cluster(clusters: list[Cluster]) -> Cluster:
    """Return the first cluster, and refuse others that differ from it."""
    first = clusters[0]
    for other in clusters[1:]:
        if (first.processes, first.process) != (other.processes, other.process):
            raise ClusterError(
                f"{first.source} said process {first.process} of {first.processes}, and {other.source} process {other.process} of "
                f"{other.processes}. Leave one of them out."
            )
    return first


def join_cluster(cluster: Cluster, timeout: int, heartbeats: int) -> Cluster:
    disable_preemption_service()
    if cluster.is_on_loopback:
        distributed.keep_collectives_on_loopback()
    if cluster.process == 0:
        check_port(cluster)
    else:
        wait_for_coordinator(cluster, timeout)
    with exit_if_late(cluster, timeout):
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.processes,
            cluster.process,
            cluster_detection_method="deactivate",
            initialization_timeout=timeout + GRACE,
            heartbeat_timeout_seconds=heartbeats,
            coordinator_bind_address=cluster.coordinator if cluster.is_on_loopback else None,
        )
    return cluster


def detect_cluster(timeout: int, heartbeats: int) -> Cluster:
    """Let JAX look for a cluster and join it, and return it. Return the cluster of one process where there is none."""
    disable_preemption_service()
    try:
        jax.distributed.initialize(initialization_timeout=timeout, heartbeat_timeout_seconds=heartbeats)
    except ValueError as error:
        if str(error) == distributed.NOBODY:
            return ALONE
        raise
    return Cluster(None, *distributed.get_process_count_and_number(), source="JAX")


def disable_preemption_service() -> None:
    """Switch JAX' preemption service off, unless the environment sets it: it swallows SIGTERM, and a program that does not ask it would
    not end."""
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        jax.config.update("jax_enable_preemption_service", False)


def read_bound(seconds: float | None = None) -> float:
    """Return the seconds within which a lost process is to be named: the argument, or the value of the environment."""
    if seconds is not None:
        return check_seconds("bound", seconds, seconds)
    text = os.environ.get(names.BOUND)
    if text is None:
        return names.DEFAULT_BOUND
    try:
        parsed = float(text)
    except ValueError:
        parsed = 0.0
    return check_seconds(f"the environment variable {names.BOUND}", parsed, text)


def check_seconds(name: str, seconds: float, received: float | str) -> float:
    if not 0 < seconds < float("inf"):
        raise ClusterError(f"{name} is a number of seconds above 0; received {received!r}.")
    return seconds


def compute_heartbeat_timeout(seconds: float) -> int:
    return max(FEWEST_SECONDS, int(HEARTBEATS * seconds))
