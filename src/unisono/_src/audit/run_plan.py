"""The runs of an audit: which placements a script is run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unisono._src.typing import Json

MOST_DEVICES = 8
FIRST = "as written"
AGAIN = "as written, again"


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """A placement to run a script on."""

    name: str
    devices: int | None = None
    """Devices of each process; None leaves the placement to the script."""
    processes: int = 1
    replicas: int | None = None
    """R; None leaves it to the script."""
    hash_seed: int = 0
    """PYTHONHASHSEED, which decides the order of sets and the values of `hash` of strings."""


def plan_first_runs() -> list[RunPlan]:
    """Return the runs that the script places itself: twice, with other seeds of `hash`."""
    return [RunPlan(FIRST), RunPlan(AGAIN, hash_seed=1)]


def plan_placements(placement: Json, replicas: int, devices: Sequence[int], processes: Sequence[int]) -> list[RunPlan]:
    """Return the runs on other placements than that of the first run.

    Args:
        placement: The placement of the first run, as its record describes it.
        replicas: R of the first run, which all runs have.
        devices: Numbers of devices to run on; empty stands for 1, 2 and R.
        processes: Numbers of processes to run in; empty stands for 2, where the script's strategy is of several processes.
    """
    wanted = devices or (1, 2, min(replicas, MOST_DEVICES))
    most = replicas if placement["platform"] == "cpu" else min(replicas, placement["available"])
    counts = sorted({count for count in wanted if count <= most and count != placement["devices"]})
    plans = [RunPlan(name_devices(count), count, replicas=replicas) for count in counts]
    if not processes and placement["strategy"] == "MultiWorkerMirroredStrategy":
        processes = (2,)
    fits = placement["platform"] == "cpu" or placement["available"] > 1
    return plans + [RunPlan(f"{count} processes", 1, count, replicas) for count in processes if 1 < count <= replicas and fits]


def name_devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"
