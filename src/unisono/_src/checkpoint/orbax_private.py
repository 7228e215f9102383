"""The calls of Orbax. No other file touches what is private in Orbax; checked with orbax-checkpoint 0.12.8.

This module is imported where it is first used: Orbax takes as long to import as all of Unisono.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint.experimental.v1._src.context import context as contexts
from orbax.checkpoint.experimental.v1._src.saving import execution

from unisono._src.checkpoint.reading import ARRAYS
from unisono._src.jax_private import distributed
from unisono._src.typing import AnyArray, Json

if TYPE_CHECKING:
    from orbax.checkpoint.experimental.v1._src.path.types import PathLike

    from unisono._src.checkpoint.store import CheckpointInfo, Keep

policies = ocp.training.preservation_policies

_check_among_all = execution._check_directory_consistency


def save_arrays(path: str, arrays: Mapping[str, np.ndarray], record: dict[str, Json]) -> None:
    with make_lone_context():
        ocp.save(path, dict(arrays), checkpointable_name=ARRAYS, custom_metadata=record)


def read_record(path: str) -> Json:
    with make_lone_context():
        return ocp.checkpointables_metadata(path).custom_metadata


def load_arrays(path: str, like: Mapping[str, np.ndarray]) -> Mapping[str, AnyArray]:
    """Return the arrays of a checkpoint. `like` has their names, shapes and dtypes."""
    with make_lone_context():
        return ocp.load(path, dict(like), checkpointable_name=ARRAYS)


def choose_kept(keep: Keep, checkpoints: Sequence[CheckpointInfo]) -> Sequence[bool]:
    """Return, for each checkpoint, whether it is kept: among the newest, where `keep` is a number, or by a policy."""
    policy = policies.LatestN(keep) if isinstance(keep, int) else keep
    # Of a checkpoint's metadata, policies read the step, the time and the metrics.
    return policy.should_preserve(checkpoints, context=policies.PreservationContext())  # pyright: ignore[reportArgumentType]


def make_lone_context() -> ocp.Context:
    """Return a context in which Orbax waits for no other process: one process writes for all, and each reads for itself.

    By itself Orbax starts collectives over all devices, from its own thread, in the middle of a step.
    """
    _, process = distributed.get_process_count_and_number()
    context = ocp.Context()
    context.multiprocessing.primary_host = process
    context.multiprocessing.active_processes = {process}
    return context


def check_directory(directory: PathLike) -> None:
    """Check that active processes write to one directory. Orbax by itself also asks the processes that are not active."""
    active = contexts.get_context().multiprocessing.active_processes
    if active is None or len(active) > 1:
        _check_among_all(directory)


execution._check_directory_consistency = check_directory
