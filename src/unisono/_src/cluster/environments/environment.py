"""The cluster of a process, and the interface of what can describe one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol


class ClusterError(ValueError):
    """The description of a cluster is missing, wrong or contradicts another one."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of one training, as one of them sees them.

    Args:
        coordinator: host:port at which process 0 listens; None where JAX finds it out, or no process listens.
        processes: The number of processes.
        process: The number of this process, counted from 0.
        source: What described the cluster, in words for messages.
    """

    coordinator: str | None
    processes: int
    process: int
    source: str

    def __post_init__(self) -> None:
        if self.processes < 1 or not 0 <= self.process < self.processes:
            raise ClusterError(
                f"{self.source} said process {self.process} of {self.processes}. There must be 1 process or more, and they are counted "
                f"from 0 to {max(self.processes - 1, 0)}."
            )
        host, _, port = (self.coordinator or "host:1").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ClusterError(
                f"{self.source} said that the coordinator is {self.coordinator!r}. It is the address of process 0 and a free port there: "
                f"'10.0.0.1:1234'."
            )

    @property
    def is_on_loopback(self) -> bool:
        host = (self.coordinator or "").rpartition(":")[0]
        return host in ("localhost", "[::1]") or host.startswith("127.")


class ClusterEnvironment(Protocol):
    """A source that may describe the cluster.

    `connect` asks each source once, in every process, before JAX has started: the answer comes from the arguments of the program
    and its environment alone, and asking changes nothing.
    """

    def describe(self, environment: Mapping[str, str]) -> Cluster | None:
        """Return the cluster, or None where this source says nothing. A description that cannot be right raises a ClusterError."""
        ...


def parse_variable(name: str, value: str) -> int:
    """Return the number that an environment variable holds."""
    try:
        return int(value)
    except ValueError:
        raise ClusterError(f"the environment variable {name} is a number; received {value!r}.") from None
