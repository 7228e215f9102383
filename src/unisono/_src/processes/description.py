"""The cluster of a process, and its description by the program. The files of `environments` describe it otherwise."""

from __future__ import annotations

import dataclasses


class ClusterError(ValueError):
    """The description of a cluster is missing, wrong or contradicts another one."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of one training, as one of them sees them."""

    coordinator: str | None
    """host:port at which process 0 listens. None if JAX finds it out, or if no process listens."""
    processes: int
    process: int
    """The number of this process, counted from 0."""
    source: str
    """What described the cluster, in words for messages."""
    local_devices: tuple[int, ...] | None = None
    """The numbers of this process' GPUs on its machine; None for all that it sees."""

    def __post_init__(self) -> None:
        if self.processes < 1 or not 0 <= self.process < self.processes:
            raise ClusterError(
                f"{self.source} said process {self.process} of {self.processes}. There must be 1 process or more, and they are counted "
                f"from 0 to {max(self.processes - 1, 0)}."
            )
        host, port = self.split_address()
        if self.coordinator is not None and (not host or not port.isdecimal() or not 0 < int(port) < 65536):
            raise ClusterError(
                f"{self.source} said that the coordinator is {self.coordinator!r}. It is the address of process 0 and a free port there: "
                f"'10.0.0.1:1234'."
            )
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ClusterError(
                f"{self.source} said that the coordinator is {self.coordinator!r}. An IPv6 address stands in brackets before its port: "
                f"'[{host.strip('[]')}]:{port}'."
            )

    def split_address(self) -> tuple[str, str]:
        """Split the coordinator's address into host and port.

        An IPv6 host keeps its brackets. Both are empty if there is no coordinator.
        """
        host, _, port = (self.coordinator or "").rpartition(":")
        return host, port

    @property
    def is_on_loopback(self) -> bool:
        host = self.split_address()[0]
        return host in ("localhost", "[::1]") or host.startswith("127.")


def describe_by_arguments(coordinator: str | None, processes: int | None, process: int | None) -> Cluster | None:
    """Describe the cluster by the program's arguments. None if the program passes none."""
    if coordinator is not None and processes is not None and process is not None:
        return Cluster(coordinator, processes, process, "the program")
    values = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    raise ClusterError(
        f"received a cluster without {' and '.join(missing)}. Write all three, coordinator='10.0.0.1:1234', processes=2, process=0, or "
        f"none of them, where the environment says it."
    )
