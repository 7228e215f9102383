"""Who runs here: what replica code can ask."""

from __future__ import annotations

from typing import Any

from unisono._src.replica.trace_recorder import ReplicaCode, current


class ReplicaContext:
    """The replica whose code runs here."""

    def __init__(self, code: ReplicaCode) -> None:
        self._code = code

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The replica's number, from 0, as a traced integer."""
        return self._code.replica

    @property
    def num_replicas_in_sync(self) -> int:
        """R."""
        return self._code.replicas

    def all_reduce(self, *_: Any, **__: Any) -> Any:
        """Refused: nothing but the engine adds over replicas."""
        raise RuntimeError(
            "Replica code cannot add over replicas by itself: replicas of one device run one after another. Return the value, and "
            'write strategy.reduce("SUM", value, axis=None) after strategy.run.'
        )

    merge_call = all_gather = all_reduce


def get_replica_context() -> ReplicaContext | None:
    """In replica code, what it can ask about its replica; None outside.

    Example:
        >>> get_replica_context() is None
        True
    """
    code = current()
    return None if code is None else ReplicaContext(code)


def in_cross_replica_context() -> bool:
    """Whether this is not replica code.

    Example:
        >>> in_cross_replica_context()
        True
    """
    return current() is None
