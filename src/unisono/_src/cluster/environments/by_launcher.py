"""The description of a cluster by `unisono launch`, or by whatever sets the same three variables."""

from __future__ import annotations

from collections.abc import Mapping

from unisono._src.cluster.environments.environment import Cluster, ClusterError, parse_variable
from unisono._src.processes import names

VARIABLES = (names.COORDINATOR, names.PROCESSES, names.PROCESS)


class LauncherVariables:
    """The cluster as the variables of `unisono launch` describe it."""

    def describe(self, environment: Mapping[str, str]) -> Cluster | None:
        values = [environment.get(name) for name in VARIABLES]
        if not any(values):
            return None
        missing = [name for name, value in zip(VARIABLES, values, strict=True) if not value]
        if missing:
            raise ClusterError(
                f"the environment lacks {' and '.join(missing)}. `unisono launch` sets all of {', '.join(VARIABLES)}; set them or none."
            )
        coordinator = environment[VARIABLES[0]]
        processes = environment[VARIABLES[1]]
        process = environment[VARIABLES[2]]
        source = f"the environment ({names.COORDINATOR} and its kin)"
        return Cluster(coordinator, parse_variable(VARIABLES[1], processes), parse_variable(VARIABLES[2], process), source)
