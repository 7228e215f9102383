"""The kind of a device: two devices of one kind give the same bits."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from unisono._src.xla import processor

DeviceKind = Mapping[str, str]


def describe_device(device: jax.Device) -> dict[str, str]:
    """Return the kind of a device, in words. For a CPU, instructions and caches are part of it: XLA chooses kernels by them."""
    return {"device": device.device_kind} | (processor.describe_processor() if device.platform == "cpu" else {})


def list_kind_differences(theirs: DeviceKind, ours: DeviceKind, there: str = "there", here: str = "here") -> list[str]:
    """Return in words how two kinds differ. Facts that only one side knows are left out; of instructions, only those of one side are listed.

    >>> list_kind_differences({"caches": "32K", "instructions": "avx2 fma"}, {"caches": "48K", "instructions": "avx2 avx512f fma"})
    ['caches: 32K there, 48K here', 'instructions: avx512f only here']
    """
    names = [name for name in sorted({*theirs, *ours}) if theirs.get(name) and ours.get(name) and theirs[name] != ours[name]]
    texts = {name: f"{theirs[name]} {there}, {ours[name]} {here}" for name in names}
    if "instructions" in texts:
        our_instructions = ours["instructions"].split()
        their_instructions = theirs["instructions"].split()
        only = {
            there: sorted(set(their_instructions) - set(our_instructions)),
            here: sorted(set(our_instructions) - set(their_instructions)),
        }
        texts["instructions"] = ", ".join(f"{' '.join(missing)} only {side}" for side, missing in only.items() if missing)
    return [f"{name}: {text}" for name, text in texts.items()]
