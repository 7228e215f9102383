"""A program of one process that was started several times."""

from __future__ import annotations

import os

import jax

from unisono._src.processes import names


def check_alone(strategy: str) -> None:
    """Raise where `unisono launch` has started several processes, and none of them has met the others: each would train by itself."""
    processes = os.environ.get(names.PROCESSES, "1")
    if processes not in ("", "1") and not jax.distributed.is_initialized():
        raise ValueError(
            f"`unisono launch` has started {processes} processes, and {strategy} knows this one alone: each of them would train the whole "
            f"model by itself. Write MultiWorkerMirroredStrategy(), whose replicas are those of all processes, or start the program by python."
        )
