"""The description of a run beside its program: kept in a checkpoint, and compared when another run goes on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax

from unisono._src.versions import list_versions
from unisono._src.xla import device_kind, runtime

if TYPE_CHECKING:
    from unisono._src.ownership import OwningStrategy
    from unisono._src.typing import Json


def describe_run(strategy: OwningStrategy | None, replicas: int | None) -> dict[str, Json]:
    """Return what the bits of a run depend on beside its program, seed and data, in JSON.

    The strategy is None outside every scope; R is None where neither strategy nor data have it.
    """
    return {
        "versions": list_versions(),
        "replicas": replicas,
        "deterministic": None if strategy is None else strategy.deterministic,
        "device": device_kind.describe_device(jax.local_devices()[0] if strategy is None else strategy.devices[0]),
        "single_thread": runtime.count_threads() < runtime.FEWEST_THREADS,
        "precision": {
            "x64": bool(jax.config.jax_enable_x64),  # pyright: ignore[reportAttributeAccessIssue]
            "matmul": jax.config.jax_default_matmul_precision,  # pyright: ignore[reportAttributeAccessIssue]
        },
    }


def read_device_kind(record: Mapping[str, Json]) -> device_kind.DeviceKind:
    """Return the kind of device in a record; older records have only its name."""
    kind = record["device"]
    return {"device": kind} if isinstance(kind, str) else kind
