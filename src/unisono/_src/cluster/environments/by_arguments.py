"""The description of a cluster by the arguments of the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from unisono._src.cluster.environments.environment import Cluster, ClusterError


@dataclasses.dataclass(frozen=True)
class ClusterArguments:
    """The cluster as the program itself describes it: all three values, or none."""

    coordinator: str | None
    processes: int | None
    process: int | None

    def describe(self, environment: Mapping[str, str]) -> Cluster | None:
        if self.coordinator is None and self.processes is None and self.process is None:
            return None
        if self.coordinator is None or self.processes is None or self.process is None:
            missing = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is None]
            raise ClusterError(
                f"received a cluster without {' and '.join(missing)}. Write all three, coordinator='10.0.0.1:1234', processes=2, process=0, or "
                f"none of them, where the environment says it."
            )
        return Cluster(self.coordinator, self.processes, self.process, "the program")
