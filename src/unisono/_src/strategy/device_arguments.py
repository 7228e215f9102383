"""What a strategy is made with: how many devices, or which, and into how many parts a global batch is cut."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from unisono._src import near_names
from unisono._src.strategy.device_names import translated
from unisono._src.xla import determinism

Devices = int | Sequence[jax.Device] | jax.sharding.Mesh | None


def refuse_form(init: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raise for arguments that a strategy does not have: misspelt ones, and those of older programs, which had other forms."""
    (strategy, *positional), names = args, near_names.names_of(init)
    older = {key: value for key, value in kwargs.items() if key not in names}
    received = [repr(value) for value in positional] + [f"{key}={value!r}" for key, value in older.items()]
    meant = next(filter(None, map(translated, (*positional, *older.values()))), None) or correctly_spelt(older, names)
    name = type(strategy).__name__
    raise TypeError(
        f"{name} takes {near_names.listed(names)}, by name, and received {', '.join(received)}. "
        f"Write {strategy._example if meant is None else f'{name}({meant})'}."
    ) from None


def correctly_spelt(arguments: dict[str, Any], names: Sequence[str]) -> str | None:
    """Return what was meant by names that are nearly right, as it is to be written."""
    near = near_names.nearest(arguments, names)
    if len(near) < len(arguments) or not near:
        return None
    return ", ".join(f"{near[key]}={value!r}" for key, value in arguments.items())


def check(name: str, devices: Devices, replicas: int | None, accumulate: int | None, deterministic: bool) -> None:
    """What contradicts itself is an error of the strategy of this name."""
    if not isinstance(deterministic, bool):
        raise ValueError(f"{name} received deterministic={deterministic!r}; write True or False.")
    determinism.check_switch(deterministic)
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
    count = devices if isinstance(devices, int) or devices is None else len(listed(devices))
    if count and replicas and count > replicas:
        raise ValueError(
            f"{name} received {count} devices and replicas={replicas}, but each device runs at least one replica. Write "
            f"devices={replicas}, or replicas={count} to cut the global batch finer."
        )


def found(name: str, devices: Devices) -> list[jax.Device]:
    """The devices that a strategy of this name shall run on, of those of this process. JAX starts here, unless it has."""
    if devices is None:
        return jax.local_devices()
    if not isinstance(devices, int):
        return listed(devices)
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


def whole_number(name: str, value: Any) -> Any:
    """Numbers of NumPy and others as Python's; what is no number passes."""
    if isinstance(value, (bool, float)):
        raise ValueError(f"{name} must be a whole number; received {name}={value!r}.")
    return operator.index(value) if hasattr(value, "__index__") else value


def listed(devices: Sequence[jax.Device] | jax.sharding.Mesh) -> list[jax.Device]:
    meant = translated(devices)
    if meant is not None:
        raise ValueError(f"devices must be a count, a list of JAX devices or a mesh; received names, {devices!r}. Write {meant}.")
    found = list(devices.devices.flat) if isinstance(devices, jax.sharding.Mesh) else list(devices)
    odd = [d for d in found if not isinstance(d, jax.Device)]
    if odd or not found:
        raise ValueError(
            f"devices must be a count, a list of JAX devices or a mesh; received {devices!r}. Write devices=2, or "
            f"devices=jax.devices()[:2]."
        )
    if len(set(found)) < len(found):
        raise ValueError(f"devices names a device twice: {found}. One device can run many replicas: write accumulate=2.")
    return found
