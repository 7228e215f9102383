"""Ray, which is an optional dependency."""

from __future__ import annotations

import importlib
from typing import Any


def import_ray() -> Any:
    """Import Ray with Ray Train, or say what to install."""
    try:
        for part in ("ray.train.collective", "ray.train.v2.jax"):  # older versions lack them, and so does Ray Train V1
            importlib.import_module(part)
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            f'unisono.ray needs Ray Train V2, which cannot be imported ({error}). Write: pip install "unisono[ray]"'
        ) from error
