"""The connection to the other processes through `jax.distributed`.

A program that has initialized `jax.distributed` itself keeps its connection.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time

import jax

from unisono._src.processes import names
from unisono._src.processes.description import Cluster, ClusterError, describe_by_arguments
from unisono._src.processes.environments.environment import ADDRESS
from unisono._src.processes.environments.precedence import (
    describe_by_agreeing,
    describe_by_around,
    describe_by_first,
    require_same_cluster,
)
from unisono._src.programs.private import distributed
from unisono._src.programs.private.backends import has_jax_started

ALONE = Cluster(None, 1, 0, "nobody")
HEARTBEATS = 4
"""JAX aborts a process that misses the others for this many bounds. The watch, which says more, comes first."""

FEWEST_SECONDS = 100
"""JAX' own default for its heartbeats."""

GRACE = 30
"""Seconds that JAX waits longer for the others than Unisono: it aborts without naming the missing process."""

NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of an address that this machine has not, such as an IPv6 address on a machine without IPv6."""

PAUSE = 0.2
"""Seconds between two tries to reach process 0."""

CERTIFICATES = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")
"""By these JAX has process 0 talk to processes with a certificate alone. `jax.distributed.initialize` reads them."""


def connect_processes(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None, *, timeout: int = 300
) -> Cluster:
    """Connect this process to the others, before JAX starts.

    The arguments or an environment describe the cluster: `environments/precedence.py` has their order. If none does, JAX looks for a
    cluster (Kubernetes, TPU pods). If it finds none, this is a single process, and nothing is done. A `jax.distributed` that is initialized
    already is taken as it is. All processes must have come after `timeout` seconds.
    """
    agreed = describe_by_agreeing(os.environ, describe_by_arguments(coordinator, processes, process))
    if jax.distributed.is_initialized():
        initialized = read_connected_cluster("jax.distributed, which is initialized already,")
        return require_same_cluster([initialized, agreed]) or initialized
    described = agreed or describe_by_around(os.environ)
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
    check_certificates()
    heartbeats = compute_heartbeat_timeout(read_bound())
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:  # it swallows SIGTERM: a program that does not ask it would not end
        jax.config.update("jax_enable_preemption_service", False)
    if described is None:
        return detect_cluster(timeout, heartbeats)
    return join_cluster(described, timeout, heartbeats)


def check_certificates() -> None:
    """Refuse certificates that JAX would not use. Anybody could talk to process 0 then, and the user believes otherwise."""
    named = [name for name in CERTIFICATES if os.environ.get(name)]
    missing = [name for name in CERTIFICATES if name not in named]
    if named and not has_certificates():
        raise ClusterError(
            f"{named[0]} names a file, and jax {jax.__version__} connects processes without certificates: whoever reaches process 0 could "
            f"talk to it. Install jax 0.12 or newer, or unset the variable."
        )
    if named and missing:
        raise ClusterError(
            f"{named[0]} names a file, and nothing names {' and '.join(missing)}: JAX needs all three, a certificate, its key, and that of the "
            f"authority. Set them in every process, or none of them."
        )


def has_certificates() -> bool:
    """Whether this JAX can connect processes by certificates."""
    return hasattr(jax.config, "jax_mtls_cert_file")


def read_connected_cluster(source: str) -> Cluster:
    """Describe the cluster that `jax.distributed` has connected."""
    return Cluster(None, *distributed.get_process_count_and_number(), source)


def join_cluster(cluster: Cluster, timeout: int, heartbeats: int) -> Cluster:
    """Connect to process 0 of a described cluster within `timeout` seconds."""
    if cluster.coordinator is None:
        raise ClusterError(
            f"{cluster.source} said process {cluster.process} of {cluster.processes}, and not at which address process 0 listens. Set "
            f"{ADDRESS} in each process, to the address of the machine of process 0 and a free port there: '10.0.0.1:1234'."
        )
    if cluster.is_on_loopback:
        distributed.keep_collectives_on_loopback()
    if cluster.process == 0:
        check_port(cluster)
    else:
        wait_for_coordinator(cluster, timeout)
    timer = threading.Timer(timeout, exit_late, (cluster, timeout))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.processes,
            cluster.process,
            cluster.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=timeout + GRACE,
            heartbeat_timeout_seconds=heartbeats,
            coordinator_bind_address=cluster.coordinator if cluster.is_on_loopback else None,
        )
    finally:
        timer.cancel()
    return cluster


def check_port(cluster: Cluster) -> None:
    """Refuse an address at which process 0 cannot listen. jaxlib 0.10.2 now and then crashes there without a word.

    On loopback JAX listens at the address itself, else at all addresses of this machine.
    """
    host, port = cluster.split_address()
    is_ipv6 = host.startswith("[") if cluster.is_on_loopback else socket.has_dualstack_ipv6()
    try:
        with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as listener:
            # Ports of connections that have ended are free. With SO_REUSEPORT, which gRPC sets, those of other coordinators would seem so.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_ipv6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((host.strip("[]") if cluster.is_on_loopback else "", int(port)))
    except OSError as error:
        what = "an address that this machine has" if error.errno in NO_SUCH_ADDRESS else "another port"
        raise ClusterError(
            f"process 0 of {cluster.processes} cannot listen at {cluster.coordinator} ({cluster.source} said so): {error}. Name {what}, "
            f"the same in all processes."
        ) from error


def wait_for_coordinator(cluster: Cluster, timeout: float) -> None:
    """Wait until process 0 listens."""
    host, port = cluster.split_address()
    end = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=max(PAUSE, end - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise ClusterError(f"{describe_late_others(cluster, timeout)} Nobody listens there: {error}.") from error
        time.sleep(PAUSE)


def exit_late(cluster: Cluster, timeout: float) -> None:
    """End this process, whose main thread waits in compiled code."""
    text = f"unisono: {describe_late_others(cluster, timeout)} Not all have come.{describe_wanted_certificates()}"
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


def describe_wanted_certificates() -> str:
    """Say that others may lack a certificate. JAX does not say whom it keeps out."""
    if not os.environ.get(CERTIFICATES[0]):
        return ""
    return (
        f" This process talks only to processes that show a certificate: each needs {', '.join(CERTIFICATES[:-1])} and {CERTIFICATES[-1]} of one "
        f"authority, and that of process 0 must name this address."
    )


def describe_late_others(cluster: Cluster, timeout: float) -> str:
    return (
        f"process {cluster.process} of {cluster.processes} waited {timeout:g} seconds for the others at {cluster.coordinator} "
        f"({cluster.source} said so). All processes must run, process 0 be reachable at that address, and its port be free."
    )


def detect_cluster(timeout: int, heartbeats: int) -> Cluster:
    """Let JAX detect a cluster, and join it. If JAX finds none, this is a single process."""
    try:
        jax.distributed.initialize(initialization_timeout=timeout, heartbeat_timeout_seconds=heartbeats)
    except ValueError as error:
        if str(error) == distributed.NOBODY:
            return ALONE
        if str(error) == distributed.NO_COUNT:
            raise ClusterError(
                f"{ADDRESS}={os.environ.get(ADDRESS)} says where process 0 listens, and nothing says how many processes there are. Set "
                f"JAX_NUM_PROCESSES and JAX_PROCESS_ID too, or none of the three."
            ) from None
        raise
    return read_connected_cluster("JAX")


def read_bound() -> float:
    """Read the bound: seconds within which a lost process is named."""
    text = os.environ.get(names.BOUND, str(names.DEFAULT_BOUND))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ClusterError(f"the environment variable {names.BOUND} is a number of seconds above 0; received {text!r}.")
    return seconds


def compute_heartbeat_timeout(bound: float) -> int:
    """Compute JAX's heartbeat timeout in seconds. It must not be sooner than the watch."""
    return max(FEWEST_SECONDS, int(HEARTBEATS * bound))


def check_alone(strategy: str) -> None:
    """Refuse one of several processes that is not connected. Each of them would train the whole model by itself."""
    found = describe_by_first(os.environ)
    if found is None or found[1].processes == 1 or jax.distributed.is_initialized():
        return
    environment, cluster = found
    raise ClusterError(
        f"{environment.show_variables(os.environ)} ({environment.name}) makes this process {cluster.process} of {cluster.processes}, and "
        f"{strategy} knows this one alone: each of them would train the whole model by itself. Write MultiWorkerMirroredStrategy(), whose "
        f"replicas are those of all processes, or start one process. Where each process is meant to train a model of its own, set "
        f"{names.PROCESSES}=1 and no other variable of {names.COORDINATOR}'s kin in it."
    )
