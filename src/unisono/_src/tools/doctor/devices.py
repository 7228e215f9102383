"""Findings about the devices on which JAX runs. JAX must have started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import jax

from unisono._src.engine.xla.determinism import GPU_PLATFORMS
from unisono._src.tools.doctor.finding import Finding, PromiseVerdict

SECTION = "devices"


def examine_devices() -> Iterator[Finding]:
    """Yield a finding for each kind of device of this process."""
    devices = jax.local_devices()
    for (platform, kind), count in Counter((device.platform, device.device_kind) for device in devices).items():
        runtime = next(device.client.platform_version for device in devices if device.platform == platform).splitlines()[0]
        name = platform.upper() if kind == platform else f"{platform.upper()} ({kind})"
        if platform == "cpu":
            yield Finding(SECTION, name, "as many devices as a strategy asks for, on these cores")
        else:
            plural = "s" * (count != 1)
            yield Finding(
                SECTION, name, f"{count} device{plural}, {runtime}: only the self-test speaks for it", PromiseVerdict.NOTE
            )
    if len({device.device_kind for device in devices}) > 1:
        yield Finding(
            SECTION,
            "kinds",
            "devices of several kinds, which have other bits: which replica runs where then decides the result",
            PromiseVerdict.BREAKS,
            "CUDA_VISIBLE_DEVICES=... to leave devices of one kind" if devices[0].platform in GPU_PLATFORMS else "",
        )
