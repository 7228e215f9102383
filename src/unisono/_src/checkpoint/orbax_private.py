"""What is asked of Orbax, and the only file that touches what is private in it; checked with orbax-checkpoint 0.12.8.

It is imported where it is first used: Orbax takes as long to import as all of Unisono.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint.experimental.v1._src.context import context as contexts
from orbax.checkpoint.experimental.v1._src.saving import execution

from unisono._src.checkpoint.folders import ARRAYS
from unisono._src.jax_private import distributed

policies = ocp.training.preservation_policies

_check = execution._check_directory_consistency


def write(path: str, arrays: Mapping[str, np.ndarray], record: dict[str, Any]) -> None:
    with alone():
        ocp.save(path, dict(arrays), checkpointable_name=ARRAYS, custom_metadata=record)


def record_of(path: str) -> Any:
    with alone():
        return ocp.checkpointables_metadata(path).custom_metadata


def read(path: str, like: Mapping[str, np.ndarray]) -> Any:
    with alone():
        return ocp.load(path, dict(like), checkpointable_name=ARRAYS)


def stay(keep: Any, checkpoints: Sequence[Any]) -> Sequence[bool]:
    """Which of them a number of newest ones, or a policy, keeps."""
    policy = policies.LatestN(keep) if isinstance(keep, int) else keep
    return policy.should_preserve(checkpoints, context=policies.PreservationContext())


def alone() -> ocp.Context:
    """In which Orbax does not wait for other processes: one of those that train together writes, and each reads for itself.

    Its own way is collectives over all devices, from its thread, in the middle of a step.
    """
    _, me = distributed.place()
    context = ocp.Context()
    context.multiprocessing.primary_host, context.multiprocessing.active_processes = me, {me}
    return context


def check_directory(directory: Any) -> None:
    """Orbax asks all processes whether they mean the same directory, those too that are not active."""
    active = contexts.get_context().multiprocessing.active_processes
    if active is None or len(active) > 1:
        _check(directory)


execution._check_directory_consistency = check_directory
