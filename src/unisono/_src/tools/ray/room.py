"""What Ray waits for while a training has no workers. The process of Ray that starts them says it.

This module is pickled by value, and imports nothing of Unisono: that process would import Keras and JAX otherwise.
"""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any

SECONDS = 10.0
"""Without workers, until it is said."""
WAITS = ("InitializingState", "SchedulingState", "ReschedulingState", "RestartingState", "ResizingState")
"""The states of Ray's controller in which a training has no workers, and will have some."""


def make_room_callback() -> Any:
    """Make the callback for `RunConfig(callbacks=)` that says what a training without workers waits for."""
    ray = importlib.import_module("ray")
    base = importlib.import_module("ray.train.v2._internal.execution.callback").ControllerCallback
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return type("RoomCallback", (RoomCallback, base), {})()


class RoomCallback:
    """Waits with Ray's controller. It is told of each of the controller's states."""

    _timer: threading.Timer | None = None
    _scaling: Any = None
    _state = WAITS[0]

    def after_controller_start(self, train_run_context: Any) -> None:
        self._scaling = train_run_context.scaling_config
        self._begin()

    def after_controller_state_update(self, previous_state: object, current_state: object) -> None:
        self._state = type(current_state).__name__
        if self._state in WAITS:
            self._begin()
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(SECONDS, self._say)
            self._timer.daemon = True
            self._timer.start()

    def _say(self) -> None:
        ray = importlib.import_module("ray")
        worker = self._scaling._resources_per_worker_not_none
        wanted, free = self._scaling.min_workers, ray.available_resources()
        # Workers that have room take some seconds to start. If Ray counts nodes first, it asks for room when there is enough.
        if self._state == "SchedulingState":
            waits = any(is_waiting(group, worker) for group in ray.util.placement_group_table().values())
        else:
            waits = any(free.get(name, 0) < wanted * amount for name, amount in worker.items())
        if waits:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            print(describe_wait(wanted, worker, count_room(nodes, worker), free), file=sys.stderr, flush=True)
        else:
            self._timer = None
            self._begin()  # to look again


def is_waiting(group: Mapping[str, Any], worker: Mapping[str, float]) -> bool:
    """Whether a placement group of such workers has no room yet."""
    return group["state"] in ("PENDING", "RESCHEDULING") and all(bundle == worker for bundle in group["bundles"].values())


def count_room(nodes: Iterable[Mapping[str, float]], worker: Mapping[str, float]) -> int | None:
    """Count the workers for which nodes have room, whatever else runs there. None if workers need nothing.

    >>> count_room([{"CPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}], {"CPU": 2.0, "GPU": 1.0})
    1
    """
    needs = {name: amount for name, amount in worker.items() if amount}
    if not needs:
        return None
    return sum(min(math.floor(node.get(name, 0) / amount) for name, amount in needs.items()) for node in nodes)


def describe_wait(workers: int, worker: Mapping[str, float], room: int | None, free: Mapping[str, float]) -> str:
    """Describe what a training waits for, and what to do."""
    begin = (
        f"unisono.ray: no workers run for {SECONDS:g} seconds. ScalingConfig asks for {workers} of them, each with {dict(worker)}"
    )
    if room is None or room >= workers:
        left = {name: free.get(name, 0.0) for name in worker}
        return f"{begin}; of these {left} are free: other programs have the rest. Ray waits until they end, or other nodes come."
    fewer = f", or write ScalingConfig(num_workers={room})" if room else ""
    return (
        f"{begin}; the nodes of this cluster have room for {room}, even if nothing else runs there. Ray waits until other nodes come: "
        f"start them{fewer}."
    )
