"""What one kind of device is: two devices of one kind give the same bits."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from unisono._src.xla import processor

Kind = Mapping[str, str]


def kind_of(device: jax.Device) -> dict[str, str]:
    """Return the kind of a device, in words; of a CPU with its instructions and caches, by which kernels are chosen."""
    return {"device": device.device_kind} | (processor.facts() if device.platform == "cpu" else {})


def differences(theirs: Kind, ours: Kind, there: str = "there", here: str = "here") -> list[str]:
    """Return in words what differs, of what is known of both; of instructions, those that only one of them has.

    >>> differences({"caches": "32K", "instructions": "avx2 fma"}, {"caches": "48K", "instructions": "avx2 avx512f fma"})
    ['caches: 32K there, 48K here', 'instructions: avx512f only here']
    """
    known = [name for name in sorted({*theirs, *ours}) if theirs.get(name) and ours.get(name) and theirs[name] != ours[name]]
    said = {name: f"{theirs[name]} {there}, {ours[name]} {here}" for name in known}
    if "instructions" in said:
        mine, others = ours["instructions"].split(), theirs["instructions"].split()
        apart = {there: sorted(set(others) - set(mine)), here: sorted(set(mine) - set(others))}
        said["instructions"] = ", ".join(f"{' '.join(names)} only {where}" for where, names in apart.items() if names)
    return [f"{name}: {words}" for name, words in said.items()]
