"""The variables of SkyPilot, which starts a program once on each node."""

from __future__ import annotations

from collections.abc import Mapping

from unisono._src.processes.description import Cluster
from unisono._src.processes.environments.environment import PORT, Environment, are_all_set, join_address, read_number

NODES = "SKYPILOT_NUM_NODES"
NODE = "SKYPILOT_NODE_RANK"
ADDRESSES = "SKYPILOT_NODE_IPS"
DEFAULT_PORT = 8482
"""JAX's own port on TPU pods."""


def describe_by_skypilot(environment: Mapping[str, str]) -> Cluster | None:
    """Describe a cluster of one process a node by SkyPilot's variables.

    None if they are unset, or count one node: JAX may detect more processes on it.
    """
    if not are_all_set(environment, (NODES, NODE, ADDRESSES), "SkyPilot"):
        return None
    nodes = read_number(environment, NODES)
    if nodes == 1:
        return None
    address = join_address(environment[ADDRESSES].split()[0], environment.get(PORT) or DEFAULT_PORT)
    return Cluster(address, nodes, read_number(environment, NODE), "SkyPilot")


ENVIRONMENT = Environment("SkyPilot", (NODES, NODE, ADDRESSES), describe_by_skypilot)
