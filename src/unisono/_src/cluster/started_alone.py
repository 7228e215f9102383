"""A program for one process that was started in several."""

from __future__ import annotations

import os

import jax

from unisono._src.processes import names


def check_alone(strategy: str) -> None:
    """Refuse processes that `unisono launch` has started and that are not connected: each of them would train by itself."""
    processes = os.environ.get(names.PROCESSES, "1")
    if processes not in ("", "1") and not jax.distributed.is_initialized():
        raise ValueError(
            f"`unisono launch` has started {processes} processes, and {strategy} knows this one alone: each of them would train the whole "
            f"model by itself. Write MultiWorkerMirroredStrategy(), whose replicas are those of all processes, or start the program by python."
        )
