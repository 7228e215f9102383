"""The arguments of a strategy: its devices and its replicas."""

from __future__ import annotations

import dataclasses
import operator
import os
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NoReturn, SupportsIndex, TypeAlias

import jax

from unisono._src import near_names
from unisono._src.engine.xla import determinism
from unisono._src.kernels.native.library import load_kernels
from unisono._src.placement import Placement
from unisono._src.processes import names
from unisono._src.typing import UserObject

DeviceChoice: TypeAlias = int | Sequence[jax.Device] | jax.sharding.Mesh | None

FROZEN = "frozen"
"""The value of `shard` that cuts weights which are not trained."""

NAME = re.compile(r"(?:.*/)?(?:device:)?(?P<kind>cpu|gpu|tpu):(?P<number>\d+)", re.IGNORECASE)
"""TensorFlow's names of devices, which programs for `tf.distribute` pass to a strategy: "/gpu:0", "GPU:1", "/device:CPU:0"."""


@dataclasses.dataclass(frozen=True)
class StrategyArguments:
    """The arguments of a strategy, free of contradictions."""

    strategy: str
    """The name of the strategy."""
    devices: int | list[jax.Device] | None
    replicas: int | None
    accumulate: int | None

    @property
    def device_count(self) -> int | None:
        return len(self.devices) if isinstance(self.devices, list) else self.devices


def check_arguments(
    strategy: str, devices: DeviceChoice, replicas: int | None, accumulate: int | None, deterministic: bool
) -> StrategyArguments:
    """Check the arguments, and make their numbers Python's. Arguments that contradict each other are refused."""
    devices, replicas, accumulate = (
        as_whole_number(name, value) for name, value in (("devices", devices), ("replicas", replicas), ("accumulate", accumulate))
    )
    if not isinstance(deterministic, bool):
        raise ValueError(f"{strategy} received deterministic={deterministic!r}; write True or False.")
    determinism.check_tensorflow_switch(deterministic)
    if replicas is not None and accumulate is not None:
        raise ValueError(
            f"{strategy} received replicas={replicas} and accumulate={accumulate}, two ways of saying one thing: replicas is "
            f"accumulate times the number of devices. Write one of them."
        )
    for argument, value in (("devices", devices), ("replicas", replicas), ("accumulate", accumulate)):
        if argument != "devices" and not isinstance(value, int | None):
            raise ValueError(f"{strategy} received {argument}={value!r}; it must be a whole number.")
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{strategy} received {argument}={value}; it must be 1 or more.")
    listed = devices if isinstance(devices, int | None) else list_devices(devices)
    arguments = StrategyArguments(strategy, listed, replicas, accumulate)
    count = arguments.device_count
    if count and replicas and count > replicas:
        raise ValueError(
            f"{strategy} received {count} devices and replicas={replicas}, but each device runs at least one replica. Write "
            f"devices={replicas}, or replicas={count} to cut the global batch finer."
        )
    return arguments


def check_verified_share(strategy: str, verify: UserObject) -> None:
    """Refuse a `verify` that is no share of steps."""
    if verify is None:
        return
    if isinstance(verify, bool) or not isinstance(verify, float | int | Fraction) or not 0 < verify <= 1:
        raise ValueError(f"{strategy} received verify={verify!r}; it is the share of steps to verify. Write verify=1/100.")


def check_verified_placement(strategy: str, verify: float | None, placement: Placement) -> None:
    """Refuse a placement on which contributions cannot be verified.

    There is no second device for the computation, or no second replica. Without `verify` every placement is accepted.
    """
    if verify is None:
        return
    if placement.replicas == 1:
        raise ValueError(
            f"{strategy} received verify={verify:g} with one replica. The contribution of one replica of several is computed again: write "
            f"replicas=2 or more."
        )
    if len(placement.devices) == 1 and not placement.has_one_device_in_each_process:
        raise ValueError(
            f"{strategy} received verify={verify:g} with one device in this process. A contribution is computed again on another device of the "
            f"process, or by another process where each has one device: write devices=2 or more, or leave verify out."
        )


def check_sharded_part(strategy: str, shard: UserObject) -> None:
    """Refuse a `shard` that names no part of the state."""
    if shard not in (None, FROZEN):
        raise ValueError(
            f"{strategy} received shard={shard!r}; it is the part of the state that lies cut over the devices. Write shard={FROZEN!r}, "
            f"for the weights that are not trained, or leave it out."
        )


def check_sharded_placement(strategy: str, shard: str | None, placement: Placement) -> None:
    """Refuse a placement whose programs cannot put weights together."""
    if shard is None:
        return
    platforms = sorted({device.platform for device in placement.devices} - {"cpu"})
    if platforms:
        raise ValueError(
            f"{strategy} received shard={shard!r} for devices of the kind {platforms[0]}. So far weights lie cut over CPU devices alone: "
            f"leave shard out."
        )
    kernels = load_kernels()
    if kernels.level is None:
        raise ValueError(f"{strategy} received shard={shard!r}, which takes native kernels. Here are none: {kernels.reason}.")


def as_whole_number(name: str, value: UserObject) -> UserObject:
    """Make a whole number of another library Python's. Floats and bools are refused; all else is passed on as it is."""
    if isinstance(value, (bool, float)):
        raise ValueError(f"{name} must be a whole number; received {name}={value!r}.")
    return operator.index(value) if isinstance(value, SupportsIndex) else value


def list_devices(devices: Sequence[jax.Device] | jax.sharding.Mesh) -> list[jax.Device]:
    """List the devices of a list or a mesh. All else is refused, and so are devices that are named twice."""
    meant = translate_device_names(devices)
    if meant is not None:
        kind = "" if isinstance(devices, jax.Device) else "names, "
        raise ValueError(f"devices must be a count, a list of JAX devices or a mesh; received {kind}{devices!r}. Write {meant}.")
    chosen = list(devices.devices.flat) if isinstance(devices, jax.sharding.Mesh) else list(devices)
    if not chosen or not all(isinstance(device, jax.Device) for device in chosen):
        raise ValueError(
            f"devices must be a count, a list of JAX devices or a mesh; received {devices!r}. Write devices=2, or "
            f"devices=jax.devices()[:2]."
        )
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"devices names a device twice: {chosen}. One device can run many replicas: write accumulate=2.")
    return chosen


def find_devices(arguments: StrategyArguments) -> list[jax.Device]:
    """Find this process' devices for a strategy. JAX starts here, unless it has started."""
    if isinstance(arguments.devices, list):
        return arguments.devices
    available = jax.local_devices()
    count = len(available) if arguments.devices is None else arguments.devices
    if count <= len(available):
        return available[:count]
    kind = available[0].platform
    plural = "s" * (len(available) > 1)
    first = f"{arguments.strategy} received devices={count}, but JAX runs with {len(available)} {kind} device{plural}. "
    if kind != "cpu":
        raise ValueError(f"{first}Write devices={len(available)} or leave it out.")
    raise ValueError(
        f"{first}CPU devices are made when JAX starts, which a model, an optimizer or an array "
        f"does. Start Python anew (in a notebook: restart the kernel) and make the strategy first, or write before anything else:\n\n"
        f"    import jax\n"
        f'    jax.config.update("jax_num_cpu_devices", {count})'
    )


def refuse_unknown_arguments(
    init: Callable[..., object], args: tuple[UserObject, ...], kwargs: dict[str, UserObject]
) -> NoReturn:
    """Refuse arguments that a strategy does not have. They are misspelt, or in the forms of `tf.distribute`."""
    strategy, *positional = args
    names = near_names.list_argument_names(init)
    older = {key: value for key, value in kwargs.items() if key not in names}
    received = [repr(value) for value in positional] + [f"{key}={value!r}" for key, value in older.items()]
    near = near_names.find_near_names(older, names)
    chosen = [*positional, *(value for key, value in older.items() if near.get(key, "devices") == "devices")]
    meant = next(filter(None, map(strategy._write_devices, chosen)), None)
    name = type(strategy).__name__
    if meant is None and older and len(near) == len(older):
        meant = f"{name}({', '.join(f'{near[key]}={value!r}' for key, value in older.items())})"
    raise TypeError(
        f"{name} takes {near_names.format_arguments(names)}, by name, and received {', '.join(received)}. "
        f"Write {strategy._example if meant is None else meant}."
    ) from None


def translate_device_names(value: object) -> str | None:
    """Translate device names into JAX's argument for these devices.

    None if `value` is neither a device, nor the name of one, nor a list of names.

    >>> translate_device_names(["/gpu:0", "/gpu:1"]), translate_device_names("GPU:1"), translate_device_names(2)
    ('devices=2', 'devices=jax.devices("gpu")[1:2]', None)
    """
    if isinstance(value, jax.Device):
        value = f"{value.platform}:{jax.local_devices(backend=value.platform).index(value)}"
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        return None
    matches = [NAME.fullmatch(name) for name in names]
    devices = [(match["kind"].lower(), int(match["number"])) for match in matches if match is not None]
    if len(devices) < len(names):
        return None
    kind, first = devices[0]
    numbers = [number for _, number in devices]
    if any(other != kind for other, _ in devices):
        return "devices=[" + ", ".join(f'jax.devices("{kind}")[{number}]' for kind, number in devices) + "]"
    if kind != "cpu" and numbers == list(range(len(numbers))):
        return f"devices={len(numbers)}"
    all_of_kind = f'jax.devices("{kind}")'
    if numbers == list(range(first, first + len(numbers))):
        return f"devices={all_of_kind}[{first or ''}:{first + len(numbers)}]"
    return f"devices=[{all_of_kind}[i] for i in {numbers}]"


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
