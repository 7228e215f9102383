"""Where the records hang: the key-value store of `jax.distributed`, which process 0 keeps."""

from __future__ import annotations

from typing import Any

import jax

from unisono._src.cluster.watch import verdict
from unisono._src.cluster.watch.verdict import Verdict
from unisono._src.processes import record
from unisono._src.processes.record import Record

RECORDS = "unisono/watch/records/"
VERDICTS = "unisono/watch/verdict/"
THE_ONE = f"{VERDICTS}first"


class Board:
    """Calls wait for process 0, and for minutes where that is stopped: they are made in threads that may wait."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def publish(self, own: Record) -> None:
        self._client.key_value_set(f"{RECORDS}{own.process}", own.encoded(), allow_overwrite=True)

    def records(self) -> dict[int, Record]:
        read = [record.decoded(text) for _, text in self._client.key_value_dir_get(RECORDS)]
        return {each.process: each for each in read}

    def verdict(self) -> Verdict | None:
        found = self._client.key_value_dir_get(VERDICTS)
        return verdict.decoded(found[0][1]) if found else None

    def settle(self, own: Verdict) -> Verdict:
        """The first verdict of all processes, which is this one if nobody was sooner: who fails later fails because of that one."""
        try:
            self._client.key_value_set(THE_ONE, own.encoded())
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("ALREADY_EXISTS"):
                raise
        return self.verdict() or own
