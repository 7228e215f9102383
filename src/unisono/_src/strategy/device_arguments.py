"""The arguments of a strategy: how many devices, or which, and how many replicas."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

import jax

from unisono._src import near_names
from unisono._src.strategy.device_names import translate_device_names
from unisono._src.typing import UserObject
from unisono._src.xla import determinism

DeviceChoice: TypeAlias = int | Sequence[jax.Device] | jax.sharding.Mesh | None


def refuse_unknown_arguments(
    init: Callable[..., object], args: tuple[UserObject, ...], kwargs: dict[str, UserObject]
) -> NoReturn:
    """Refuse arguments that a strategy does not have: misspelt ones, and arguments in the forms of `tf.distribute`."""
    strategy, *positional = args
    names = near_names.list_argument_names(init)
    older = {key: value for key, value in kwargs.items() if key not in names}
    received = [repr(value) for value in positional] + [f"{key}={value!r}" for key, value in older.items()]
    meant = next(filter(None, map(translate_device_names, (*positional, *older.values()))), None) or correct_spelling(
        older, names
    )
    name = type(strategy).__name__
    raise TypeError(
        f"{name} takes {near_names.format_arguments(names)}, by name, and received {', '.join(received)}. "
        f"Write {strategy._example if meant is None else f'{name}({meant})'}."
    ) from None


def correct_spelling(arguments: dict[str, UserObject], names: Sequence[str]) -> str | None:
    """Return the arguments with the right names, as code; None where a name is near to none."""
    near = near_names.find_near_names(arguments, names)
    if len(near) < len(arguments) or not near:
        return None
    return ", ".join(f"{near[key]}={value!r}" for key, value in arguments.items())


def check_strategy_arguments(
    name: str, devices: DeviceChoice, replicas: int | None, accumulate: int | None, deterministic: bool
) -> None:
    """Refuse arguments that contradict each other. `name` is the name of the strategy."""
    if not isinstance(deterministic, bool):
        raise ValueError(f"{name} received deterministic={deterministic!r}; write True or False.")
    determinism.check_tensorflow_switch(deterministic)
    if replicas is not None and accumulate is not None:
        raise ValueError(
            f"{name} received replicas={replicas} and accumulate={accumulate}, two ways of saying one thing: replicas is "
            f"accumulate times the number of devices. Write one of them."
        )
    for argument, value in (("devices", devices), ("replicas", replicas), ("accumulate", accumulate)):
        if argument != "devices" and not isinstance(value, int | None):
            raise ValueError(f"{name} received {argument}={value!r}; it must be a whole number.")
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{name} received {argument}={value}; it must be 1 or more.")
    count = devices if isinstance(devices, int) or devices is None else len(list_devices(devices))
    if count and replicas and count > replicas:
        raise ValueError(
            f"{name} received {count} devices and replicas={replicas}, but each device runs at least one replica. Write "
            f"devices={replicas}, or replicas={count} to cut the global batch finer."
        )


def find_devices(name: str, devices: DeviceChoice) -> list[jax.Device]:
    """Return the devices of this process on which a strategy of this name runs. JAX starts here, unless it has started."""
    if devices is None:
        return jax.local_devices()
    if not isinstance(devices, int):
        return list_devices(devices)
    available = jax.local_devices()
    if devices <= len(available):
        return available[:devices]
    kind = available[0].platform
    first = f"{name} received devices={devices}, but JAX runs with {len(available)} {kind} device"
    if kind != "cpu":
        raise ValueError(f"{first}{'s' * (len(available) > 1)}. Write devices={len(available)} or leave it out.")
    raise ValueError(
        f"{first}{'s' * (len(available) > 1)}. CPU devices are made when JAX starts, which a model, an optimizer or an array "
        f"does. Start Python anew (in a notebook: restart the kernel) and make the strategy first, or write before anything else:\n\n"
        f"    import jax\n"
        f'    jax.config.update("jax_num_cpu_devices", {devices})'
    )


def as_whole_number(name: str, value: UserObject) -> UserObject:
    """Return a whole number of NumPy or another library as Python's; refuse floats and bools; return all else as it is."""
    if isinstance(value, (bool, float)):
        raise ValueError(f"{name} must be a whole number; received {name}={value!r}.")
    return operator.index(value) if hasattr(value, "__index__") else value


def list_devices(devices: Sequence[jax.Device] | jax.sharding.Mesh) -> list[jax.Device]:
    """Return the devices of a list or a mesh; refuse all else, and a device that stands there twice."""
    meant = translate_device_names(devices)
    if meant is not None:
        raise ValueError(f"devices must be a count, a list of JAX devices or a mesh; received names, {devices!r}. Write {meant}.")
    chosen = list(devices.devices.flat) if isinstance(devices, jax.sharding.Mesh) else list(devices)
    odd = [device for device in chosen if not isinstance(device, jax.Device)]
    if odd or not chosen:
        raise ValueError(
            f"devices must be a count, a list of JAX devices or a mesh; received {devices!r}. Write devices=2, or "
            f"devices=jax.devices()[:2]."
        )
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"devices names a device twice: {chosen}. One device can run many replicas: write accumulate=2.")
    return chosen
