"""The only file that touches what is private in Orbax; checked with orbax-checkpoint 0.12.8."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint.experimental.v1._src.context import context as contexts
from orbax.checkpoint.experimental.v1._src.saving import execution

from unisono.cluster import jax_seam

_check = execution._check_directory_consistency


def alone() -> ocp.Context:
    """In which Orbax does not wait for other processes: one of those that train together writes, and each reads for itself.

    Its own way is collectives over all devices, from its thread, in the middle of a step.
    """
    _, me = jax_seam.place()
    context = ocp.Context()
    context.multiprocessing.primary_host, context.multiprocessing.active_processes = me, {me}
    return context


def check_directory(directory: Any) -> None:
    """Orbax asks all processes whether they mean the same directory, those too that are not active."""
    active = contexts.get_context().multiprocessing.active_processes
    if active is None or len(active) > 1:
        _check(directory)


execution._check_directory_consistency = check_directory
