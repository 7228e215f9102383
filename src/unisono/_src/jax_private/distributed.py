"""The only file of this room that touches what is private in JAX; checked with jax and jaxlib 0.10.2."""

from __future__ import annotations

import ctypes
from typing import Any

from jax._src import distributed, xla_bridge
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

NOBODY = "coordinator_address should be defined."
"""What `jax.distributed.initialize()` raises where it detects no cluster."""


def place() -> tuple[int, int]:
    """(the number of processes, this one's); asking `jax.process_count()` would make the devices."""
    return distributed.global_state.num_processes, distributed.global_state.process_id


def client() -> Any:
    """What talks to the key-value store of process 0."""
    return distributed.global_state.client


def keep_collectives_on_loopback() -> None:
    """gloo would listen at the address of this machine's name, where others may reach it."""

    def make() -> Any:
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=client(), hostname="127.0.0.1") if client() is not None else None
        return xla_bridge.make_cpu_client(gloo)

    xla_bridge.register_backend_factory("cpu", make, priority=0, fail_quietly=False)


def leave_unseen() -> None:
    """Forgets the connection to others that are gone: taking leave would wait for them, for minutes, and then abort."""
    for connection in (distributed.global_state.client, distributed.global_state.service):
        if connection is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))  # its destructor takes leave too
    distributed.global_state.preemption_sync_manager = None
    distributed.global_state.client = distributed.global_state.service = None
