"""The cluster of a process, as the program itself, the variables of `unisono launch` or TF_CONFIG describe it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from unisono._src.processes import names
from unisono._src.typing import Json

VARIABLES = (names.COORDINATOR, names.PROCESSES, names.PROCESS)

TASK_KINDS = ("chief", "worker")
TF_CONFIG_FORM = """{"cluster": {"worker": ["10.0.0.1:1234", "10.0.0.2:1234"]}, "task": {"type": "worker", "index": 0}}"""
REFUSED_TASKS = {
    "ps": "Parameter servers are for asynchronous training, which Unisono does not do",
    "evaluator": "An evaluator of its own is not needed: fit takes validation_data, and evaluates on all workers",
}


class ClusterError(ValueError):
    """The description of a cluster is missing, wrong or contradicts another one."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of one training, as one of them sees them."""

    coordinator: str | None
    """host:port at which process 0 listens; None where JAX finds it out, or no process listens."""
    processes: int
    process: int
    """The number of this process, counted from 0."""
    source: str
    """What described the cluster, in words for messages."""

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
        """Return the host, with the brackets of an IPv6 address, and the port of the coordinator; both empty where there is none."""
        host, _, port = (self.coordinator or "").rpartition(":")
        return host, port

    @property
    def is_on_loopback(self) -> bool:
        host = self.split_address()[0]
        return host in ("localhost", "[::1]") or host.startswith("127.")


def describe_by_arguments(coordinator: str | None, processes: int | None, process: int | None) -> Cluster | None:
    """Return the cluster as the program describes it; None where it passes nothing."""
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


def describe_by_launcher(environment: Mapping[str, str]) -> Cluster | None:
    """Return the cluster as the variables of `unisono launch` describe it, whoever sets them; None where none is set."""
    missing = [name for name in VARIABLES if not environment.get(name)]
    if len(missing) == len(VARIABLES):
        return None
    if missing:
        raise ClusterError(
            f"the environment lacks {' and '.join(missing)}. `unisono launch` sets all of {', '.join(VARIABLES)}; set them or none."
        )
    processes, process = (read_number(environment, name) for name in (names.PROCESSES, names.PROCESS))
    return Cluster(environment[names.COORDINATOR], processes, process, f"the environment ({names.COORDINATOR} and its kin)")


def read_number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ClusterError(f"the environment variable {name} is a number; received {environment[name]!r}.") from None


def describe_by_tf_config(environment: Mapping[str, str]) -> Cluster | None:
    """Return the cluster as TF_CONFIG describes it; None where there is none or it names none, as in TensorFlow: a single process.

    A chief, if any, is process 0, and the workers follow. The coordinator listens where the TensorFlow server of process 0 would listen: the
    address is free, because no such server runs.
    """
    text = environment.get("TF_CONFIG")
    if not text:
        return None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(f"TF_CONFIG is not JSON ({error}). It looks like {TF_CONFIG_FORM}; received: {text}") from None
    if not isinstance(config, dict) or not all(isinstance(config.get(part, {}), dict) for part in ("cluster", "task")):
        raise ClusterError(f"TF_CONFIG looks like {TF_CONFIG_FORM}; received: {text}")
    cluster = config.get("cluster")
    if not cluster:
        return None
    task = config.get("task", {})
    check_tasks(text, cluster, task)
    addresses = {(kind, index): address for kind in TASK_KINDS for index, address in enumerate(cluster.get(kind, []))}
    tasks = list(addresses)
    own_task = task.get("type"), task.get("index")
    if own_task not in tasks:
        raise ClusterError(
            f"TF_CONFIG says that this is task {own_task[0]!r} {own_task[1]!r}, and names "
            f"{', '.join(f'{kind} {index}' for kind, index in tasks)}. Received: {text}"
        )
    return Cluster(addresses[tasks[0]], len(tasks), tasks.index(own_task), "TF_CONFIG")


def check_tasks(text: str, cluster: dict[str, Json], task: dict[str, Json]) -> None:
    for kind in (*cluster, task.get("type")):
        if kind in tuple(REFUSED_TASKS):  # the type of the task may be anything, such as a list
            raise ClusterError(
                f"TF_CONFIG names {kind!r}. {REFUSED_TASKS[kind]}. Leave it out: {TF_CONFIG_FORM}; received: {text}"
            )
        if kind not in TASK_KINDS:
            raise ClusterError(
                f"TF_CONFIG names {kind!r}, which is neither 'worker' nor 'chief'. It looks like {TF_CONFIG_FORM}; received: {text}"
            )
    for kind, addresses in cluster.items():
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise ClusterError(f"TF_CONFIG's {kind!r} is a list of addresses. It looks like {TF_CONFIG_FORM}; received: {text}")
