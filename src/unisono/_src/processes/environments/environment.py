"""What an environment is, and the reading of its variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from unisono._src.processes.description import Cluster, ClusterError

ADDRESS = "JAX_COORDINATOR_ADDRESS"
"""JAX's variable for the address and port of process 0."""

PORT = "JAX_COORDINATOR_PORT"
"""JAX's variable for the port of process 0, for environments that give the address alone."""

DEVICES = "JAX_LOCAL_DEVICE_IDS"
"""JAX's variable for the GPUs of a process."""

PORTS = range(61440, 65536)
"""JAX's choice: Linux gives none of them to outgoing connections."""

LONGEST = 120
"""Letters of a value that a message shows."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """A tool that starts processes, and the variables it sets. By them each process learns of the others."""

    name: str
    """The tool, for messages."""
    variables: tuple[str, ...]
    """The variables that we read. The first ones give the number of processes and the rank of this one."""
    describe: Callable[[Mapping[str, str]], Cluster | None]
    """Describes the cluster by the variables; None if they describe none. Called before JAX starts."""
    counting: int = 2
    """How many of the variables a message shows."""

    def show_variables(self, environment: Mapping[str, str]) -> str:
        """List the variables that count the processes, with their values."""
        shown = [name for name in self.variables[: self.counting] if environment.get(name)]
        return ", ".join(f"{name}={shorten(environment[name])}" for name in shown)


def shorten(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}..."


def are_all_set(environment: Mapping[str, str], variables: Sequence[str], setter: str) -> bool:
    """Whether all variables are set. Some without the others are refused."""
    missing = [name for name in variables if not environment.get(name)]
    if missing and len(missing) < len(variables):
        raise ClusterError(
            f"the environment lacks {' and '.join(missing)}. {setter} sets all of {', '.join(variables)}; set them or none."
        )
    return not missing


def read_number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ClusterError(f"the environment variable {name} is a number; received {environment[name]!r}.") from None


def find_address(environment: Mapping[str, str], host: str, number: int) -> str:
    """Find where process 0 listens: JAX's variables, else the host, at a port by the number of the run."""
    return environment.get(ADDRESS) or join_address(host, environment.get(PORT) or PORTS[number % len(PORTS)])


def choose_local_devices(environment: Mapping[str, str], local: str, is_only_one: bool) -> tuple[int, ...] | None:
    """Choose the GPU of this process by its local rank; None for all.

    It has all if it is the only one on its machine, or if JAX's own variable names them.
    """
    if is_only_one or not environment.get(local) or environment.get(DEVICES):
        return None
    return (read_number(environment, local),)


def join_address(host: str, port: str | int) -> str:
    """Join host and port, with an IPv6 address in brackets.

    >>> join_address("10.0.0.1", 1234), join_address("fd00::1", "1234")
    ('10.0.0.1:1234', '[fd00::1]:1234')
    """
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
