"""The board of heartbeats and verdicts: the key-value store of `jax.distributed`, which process 0 keeps."""

from __future__ import annotations

import jax

from unisono._src.cluster.watch import verdict
from unisono._src.cluster.watch.verdict import Verdict
from unisono._src.jax_private.distributed import KeyValueStore
from unisono._src.processes.heartbeat import Heartbeat, parse_heartbeat

RECORDS = "unisono/watch/records/"
VERDICTS = "unisono/watch/verdict/"
THE_ONE = f"{VERDICTS}first"
"""The key of the first verdict, which is never written again."""


class Board:
    """The heartbeats and the verdict that all processes see. Each call waits for process 0, for minutes where that is stopped, and belongs
    into a thread that may wait."""

    def __init__(self, client: KeyValueStore) -> None:
        self._client = client

    def publish_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._client.key_value_set(f"{RECORDS}{heartbeat.process}", heartbeat.to_json(), allow_overwrite=True)

    def read_heartbeats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each process, by its number."""
        heartbeats = [parse_heartbeat(text) for _, text in self._client.key_value_dir_get(RECORDS)]
        return {heartbeat.process: heartbeat for heartbeat in heartbeats}

    def read_verdict(self) -> Verdict | None:
        """Return the verdict of all processes, or None where there is none yet."""
        entries = self._client.key_value_dir_get(VERDICTS)
        return verdict.parse_verdict(entries[0][1]) if entries else None

    def settle(self, own: Verdict) -> Verdict:
        """Return the first verdict of all processes. It becomes the argument where there is none yet. A process that fails later fails because
        of the first."""
        try:
            self._client.key_value_set(THE_ONE, own.to_json())
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("ALREADY_EXISTS"):
                raise
        return self.read_verdict() or own
