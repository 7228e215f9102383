"""Joins the other processes through `jax.distributed`, if nobody has."""

from __future__ import annotations

import os

import jax

from unisono._src.cluster.arrival import GRACE, check_port, in_time, wait_for_coordinator
from unisono._src.cluster.environments.by_arguments import Arguments
from unisono._src.cluster.environments.by_launcher import Launched
from unisono._src.cluster.environments.by_tf_config import TFConfig
from unisono._src.cluster.environments.environment import Cluster, ClusterError, Environment
from unisono._src.jax_private import distributed
from unisono._src.processes import names
from unisono._src.xla.runtime import has_started

ALONE = Cluster(None, 1, 0, "nobody")
HEARTBEATS = 4
"""JAX ends a process by an abort when it misses another one. The watch, which says more, comes first: JAX waits for so many bounds."""

FEWEST_SECONDS = 100
"""JAX' own default."""


def connect(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: int = 300,
    bound: float | None = None,
) -> Cluster:
    """Makes this process one of several, before JAX starts.

    The cluster is described by the arguments, by the variables of `unisono launch`, or by TF_CONFIG. Who says something must agree
    with the others. Where all are silent, JAX looks for a cluster (Slurm, Open MPI, Kubernetes, TPU pods); where there is none,
    this is a single process, and nothing is done. Where `jax.distributed` is initialized already, it is taken as it is.

    Args:
        coordinator: host:port at which process 0 listens, where nobody but the other processes can reach it.
        processes: How many there are.
        process: Which of them this one is, counted from 0 on.
        timeout: Seconds in which all must have come.
        bound: Seconds of the watch, than which JAX must not be sooner; by default that of the environment.
    """
    described = description((Arguments(coordinator, processes, process), Launched(), TFConfig()))
    if jax.distributed.is_initialized():
        already = Cluster(None, *distributed.place(), source="jax.distributed, which is initialized already,")
        return already if described is None else agreed([already, described])
    if described is not None and described.processes == 1:
        return described
    if has_started():
        if described is None:
            return ALONE  # as it was when JAX started
        raise ClusterError(
            f"{described.source} said process {described.process} of {described.processes}, but JAX has started already, as a single process. "
            f"Make the strategy in the first lines of the program, behind the imports: arrays, jax.devices() and Keras' optimizers "
            f"start JAX."
        )
    heartbeats = heartbeat_timeout(bound_of(bound))
    return detected(timeout, heartbeats) if described is None else joined(described, timeout, heartbeats)


def description(environments: tuple[Environment, ...]) -> Cluster | None:
    """What the first of them says that says something."""
    found = [cluster for cluster in (each.describe(os.environ) for each in environments) if cluster is not None]
    return agreed(found) if found else None


def agreed(clusters: list[Cluster]) -> Cluster:
    """The first one, with which the others must agree."""
    first = clusters[0]
    for other in clusters[1:]:
        if (first.processes, first.process) != (other.processes, other.process):
            raise ClusterError(
                f"{first.source} said process {first.process} of {first.processes}, and {other.source} process {other.process} of "
                f"{other.processes}. Leave one of them out."
            )
    return first


def joined(cluster: Cluster, timeout: int, heartbeats: int) -> Cluster:
    prepare()
    if cluster.is_on_loopback:
        distributed.keep_collectives_on_loopback()
    if cluster.process == 0:
        check_port(cluster)
    else:
        wait_for_coordinator(cluster, timeout)
    with in_time(cluster, timeout):
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


def detected(timeout: int, heartbeats: int) -> Cluster:
    """JAX looks for a cluster by itself."""
    prepare()
    try:
        jax.distributed.initialize(initialization_timeout=timeout, heartbeat_timeout_seconds=heartbeats)
    except ValueError as error:
        if str(error) == distributed.NOBODY:
            return ALONE
        raise
    return Cluster(None, *distributed.place(), source="JAX")


def prepare() -> None:
    """JAX' preemption service swallows SIGTERM, and a program that does not ask it would not end."""
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        jax.config.update("jax_enable_preemption_service", False)


def bound_of(given: float | None = None) -> float:
    """Seconds within which a lost process is to be named: those that were given, or the environment's."""
    if given is not None:
        return checked("bound", given, given)
    text = os.environ.get(names.BOUND)
    if text is None:
        return names.DEFAULT_BOUND
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    return checked(f"the environment variable {names.BOUND}", seconds, text)


def checked(name: str, seconds: float, received: float | str) -> float:
    if not 0 < seconds < float("inf"):
        raise ClusterError(f"{name} is a number of seconds above 0; received {received!r}.")
    return seconds


def heartbeat_timeout(seconds: float) -> int:
    return max(FEWEST_SECONDS, int(HEARTBEATS * seconds))
