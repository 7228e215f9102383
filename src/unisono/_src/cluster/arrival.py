"""A bound for the time in which all processes must have come. JAX has one too, and aborts without naming the missing process."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

from unisono._src.cluster.environments.environment import Cluster, ClusterError

GRACE = 30
"""Seconds that JAX waits longer than Unisono."""

PAUSE = 0.2
"""Seconds between two tries to reach process 0."""


def check_port(cluster: Cluster) -> None:
    """Refuse a port at which process 0 cannot listen: jaxlib 0.10.2 now and then crashes there without a word."""
    port = int((cluster.coordinator or "").rpartition(":")[2])
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does
            listener.bind(("127.0.0.1" if cluster.is_on_loopback else "", port))
    except OSError as error:
        raise ClusterError(
            f"process 0 of {cluster.processes} cannot listen at {cluster.coordinator} ({cluster.source} said so): {error}. Name another port, "
            f"the same in all processes."
        ) from error


def wait_for_coordinator(cluster: Cluster, timeout: float) -> None:
    """Wait until process 0 listens."""
    host, _, port = (cluster.coordinator or "").rpartition(":")
    end = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=max(PAUSE, end - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise ClusterError(f"{describe_late_others(cluster, timeout)} Nobody listens there: {error}.") from error
        time.sleep(PAUSE)


@contextlib.contextmanager
def exit_if_late(cluster: Cluster, timeout: float) -> Iterator[None]:
    """End this process where the block, which waits in compiled code for the others, does not end in time."""
    timer = threading.Timer(timeout, exit_late, (cluster, timeout))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def exit_late(cluster: Cluster, timeout: float) -> None:
    print(f"unisono: {describe_late_others(cluster, timeout)} Not all have come.", file=sys.stderr, flush=True)
    os._exit(1)


def describe_late_others(cluster: Cluster, timeout: float) -> str:
    return (
        f"process {cluster.process} of {cluster.processes} waited {timeout:g} seconds for the others at {cluster.coordinator} "
        f"({cluster.source} said so). All processes must run, process 0 be reachable at that address, and its port be free."
    )
