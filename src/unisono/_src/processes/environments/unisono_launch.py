"""The variables of `unisono launch`, which any other launcher may set too."""

from __future__ import annotations

from collections.abc import Mapping

from unisono._src.processes import names
from unisono._src.processes.description import Cluster
from unisono._src.processes.environments.environment import Environment, are_all_set, read_number

VARIABLES = (names.COORDINATOR, names.PROCESSES, names.PROCESS)
SOURCE = f"the environment ({names.COORDINATOR} and its kin)"


def describe_by_launcher(environment: Mapping[str, str]) -> Cluster | None:
    """Describe the cluster by the launcher's variables; None if none is set.

    Whoever may set them. A single process needs only its number of processes, 1.
    """
    said = [name for name in VARIABLES if environment.get(name)]
    if said == [names.PROCESSES] and read_number(environment, names.PROCESSES) == 1:
        return Cluster(None, 1, 0, SOURCE)
    if not are_all_set(environment, VARIABLES, "`unisono launch`"):
        return None
    processes, process = (read_number(environment, name) for name in (names.PROCESSES, names.PROCESS))
    return Cluster(environment[names.COORDINATOR], processes, process, SOURCE)


ENVIRONMENT = Environment("unisono launch", (names.PROCESSES, names.PROCESS, names.COORDINATOR), describe_by_launcher)
