"""How far a training is in its data, and how it knows later that the rows are the same ones.

Where a source has an index, the last batch is enough: it is read again and compared. Of a stream every batch counts, since it is
read forward to the place where the training stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from unisono._src.data.global_batch import Position, Rows, is_whole

Size = dict[str, int]
"""The number of "batches" in a pass, and of "rows", where they are known."""


class Place(NamedTuple):
    """Where a training stopped."""

    position: Position
    """Of the batch that comes next."""
    last: Position | None
    """Of the batch that was trained on last."""
    first_pass: int
    """The pass in which the source was first trained on."""
    digest: str | None
    """Of all batches so far, if they were counted; else of the last one; None where there was none."""
    size: Size
    """Of the data, in the pass of the last batch."""

    @classmethod
    def of_json(cls, state: dict[str, Any]) -> Place:
        position, last = tuple(state["position"]), state["last"]
        return cls(position, None if last is None else tuple(last), state["first_pass"], state["digest"], state["size"])


class Progress:
    """Of one source, since it is trained on."""

    def __init__(self, first_pass: int = 0) -> None:
        self.first_pass = first_pass
        self.position: Position | None = None
        """Of the next batch; None as long as there was none."""
        self.last: Position | None = None
        """Of the batch that was trained on last."""
        self.size: Size = {}
        """Of the data, in the pass of that batch."""
        self._last: Any = None
        self._chain: Any = None
        self._digest: str | None = None

    def count_all(self) -> None:
        """From here on each batch goes into the digest. To be called before the first."""
        if self.position is None and self._chain is None:
            self._chain = hashlib.sha256()

    @property
    def counts_all(self) -> bool:
        return self._chain is not None

    def trained(self, batch: Any, position: Position, size: Callable[[], Size]) -> None:
        """This batch, of this position, was handed to the replicas. `size()` is asked for once in a pass: data may change behind it."""
        if self.last is None or self.last[0] != position[0]:
            self.size = size()
        self.position, self.last, self._last = (position[0], position[1] + 1), position, batch
        if self._chain is not None:
            put(self._chain, batch)

    def ended(self) -> None:
        """The pass is over: the next batch is the first of the next one."""
        if self.position is not None:
            self.position = self.position[0] + 1, 0

    @property
    def place(self) -> Place | None:
        """Where it is now; None before the first batch."""
        if self.position is None:
            return None
        if self._chain is not None:
            self._digest = f"all {self._chain.hexdigest()[:32]}"
        elif self._last is not None:
            self._digest = f"last {digest_of(self._last)}"
        return Place(self.position, self.last, self.first_pass, self._digest, self.size)


def restored(place: Place, chain: Any) -> Progress:
    """As it was at a place; `chain` is the digest of the batches before it, where they were read."""
    progress = Progress(place.first_pass)
    progress.position, progress.last, progress.size = place.position, place.last, place.size
    progress._chain, progress._digest = chain, place.digest
    return progress


def digest_of(batch: Any) -> str:
    found = hashlib.sha256()
    put(found, batch)
    return found.hexdigest()[:32]


def put(digest: Any, batch: Any) -> None:
    for leaf in jax.tree.leaves(batch, is_leaf=is_whole):
        array = leaf.array if isinstance(leaf, Rows) else leaf
        digest.update(f"{array.shape} {array.dtype}\n".encode())
        digest.update(array.tobytes())
