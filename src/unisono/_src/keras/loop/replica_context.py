"""The context of a replica, for replica code.

It has the replica's number, and the number of replicas.
"""

from __future__ import annotations

from typing import NoReturn

from unisono._src.keras.replica.trace_recorder import ReplicaCode, get_current_code
from unisono._src.typing import Array


class ReplicaContext:
    """The replica whose code runs here."""

    def __init__(self, code: ReplicaCode) -> None:
        self._code = code

    @property
    def replica_id_in_sync_group(self) -> Array:
        """The replica's number, from 0, as a traced integer."""
        return self._code.replica

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the number of replicas."""
        return self._code.replicas

    def all_reduce(self, *_: object, **__: object) -> NoReturn:
        """Refuse the call. Nothing but the engine adds over replicas."""
        raise RuntimeError(
            "Replica code cannot add over replicas by itself: replicas of one device run one after another. Return the value, and "
            'write strategy.reduce("SUM", value, axis=None) after strategy.run.'
        )

    merge_call = all_gather = all_reduce


def get_replica_context() -> ReplicaContext | None:
    """The context of the replica whose code runs here. None outside of replica code.

    Example:
        >>> get_replica_context() is None
        True
    """
    code = get_current_code()
    return None if code is None else ReplicaContext(code)


def in_cross_replica_context() -> bool:
    """Whether this is not replica code.

    Example:
        >>> in_cross_replica_context()
        True
    """
    return get_current_code() is None
