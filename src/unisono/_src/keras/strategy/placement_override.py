"""The placement that the environment dictates. UNISONO_DEVICES and UNISONO_REPLICAS override a script's strategies."""

from __future__ import annotations

import dataclasses
import os

from unisono._src.keras.strategy.device_arguments import DeviceChoice
from unisono._src.processes import names


@dataclasses.dataclass(frozen=True)
class PlacementArguments:
    """A strategy's arguments for its devices and replicas."""

    devices: DeviceChoice
    replicas: int | None
    accumulate: int | None


def is_devices_overridden() -> bool:
    """Whether the environment sets the number of devices."""
    return bool(os.environ.get(names.DEVICES))


def override_placement(devices: DeviceChoice, replicas: int | None, accumulate: int | None) -> PlacementArguments:
    """Override the script's arguments by the environment's."""
    said_devices = read_count(names.DEVICES)
    said_replicas = read_count(names.REPLICAS)
    return PlacementArguments(
        devices if said_devices is None else said_devices,
        replicas if said_replicas is None else said_replicas,
        accumulate if said_replicas is None else None,
    )


def read_count(name: str) -> int | None:
    """Read a count from an environment variable; None if empty or unset. All but whole numbers from 1 on are refused."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"the environment variable {name} is a whole number of 1 or more; received {text!r}.")
    return int(text)
