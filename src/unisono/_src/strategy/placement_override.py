"""The placement by the environment: UNISONO_DEVICES and UNISONO_REPLICAS take the place of what a script's strategies say."""

from __future__ import annotations

import dataclasses
import os

from unisono._src.processes import names
from unisono._src.strategy.device_arguments import DeviceChoice


@dataclasses.dataclass(frozen=True)
class PlacementArguments:
    """The arguments of a strategy that say how many replicas run on which devices."""

    devices: DeviceChoice
    replicas: int | None
    accumulate: int | None


def is_devices_overridden() -> bool:
    """Return whether the environment says how many devices a strategy has."""
    return bool(os.environ.get(names.DEVICES))


def override_placement(devices: DeviceChoice, replicas: int | None, accumulate: int | None) -> PlacementArguments:
    """Return the arguments, with what the environment says in place of what the script says."""
    said_devices = read_count(names.DEVICES)
    said_replicas = read_count(names.REPLICAS)
    return PlacementArguments(
        devices if said_devices is None else said_devices,
        replicas if said_replicas is None else said_replicas,
        accumulate if said_replicas is None else None,
    )


def read_count(name: str) -> int | None:
    """Return the number in an environment variable; None where it is not set or empty. Refuse all but whole numbers from 1 on."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"the environment variable {name} is a whole number of 1 or more; received {text!r}.")
    return int(text)
