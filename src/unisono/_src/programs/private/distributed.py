"""The connection between processes."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Protocol

from jax._src import distributed, xla_bridge
from jaxlib import _jax

if TYPE_CHECKING:
    from jaxlib import xla_client

NOBODY = "coordinator_address should be defined."
"""The error of `jax.distributed.initialize()` if it detects no cluster."""

NO_COUNT = "Number of processes must be defined."
"""Its error if it detects no cluster, and a variable names the address."""


class KeyValueStore(Protocol):
    """The client of process 0's key-value store. It is the part of jaxlib's DistributedRuntimeClient that Unisono calls."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


def get_process_count_and_number() -> tuple[int, int]:
    """Get the number of processes, and the number of this one. `jax.process_count()` would make the devices."""
    return distributed.global_state.num_processes, distributed.global_state.process_id


def get_client() -> KeyValueStore | None:
    """Get the client of process 0's key-value store. None in a process that is not connected."""
    return distributed.global_state.client


def keep_collectives_on_loopback() -> None:
    """Have gloo listen on loopback. By default it listens at the address of this machine's name, where others may reach it."""

    def make_cpu_client() -> xla_client.Client:
        gloo = (
            _jax.make_gloo_tcp_collectives(distributed_client=get_client(), hostname="127.0.0.1")
            if get_client() is not None
            else None
        )
        return xla_bridge.make_cpu_client(gloo)

    xla_bridge.register_backend_factory("cpu", make_cpu_client, priority=0, fail_quietly=False)


def forget_connection() -> None:
    """Forget the connection to processes that are gone. A regular shutdown would wait for them, for minutes, and then abort."""
    for connection in (distributed.global_state.client, distributed.global_state.service):
        if connection is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))  # its destructor shuts the connection down too
    distributed.global_state.preemption_sync_manager = None
    distributed.global_state.client = distributed.global_state.service = None
