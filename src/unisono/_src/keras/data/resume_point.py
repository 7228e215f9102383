"""The resume point of a training in its data, with a digest.

By the digest a resumed training knows that the rows are the same. For a source with an index, the digest of the last batch is enough: the
batch is read again and compared. For a stream every batch counts, since the stream is read forward to the resume point.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from unisono._src.engine.global_batch import Position, as_global_batch
from unisono._src.typing import Json, PyTree

LeftPasses: TypeAlias = tuple[int, int, int]
"""(first, stop, number): a loop left each pass in range(first, stop) before its end, after `number` batches."""

Size = dict[str, int]
"""The number of "batches" and of "rows" in a pass, if they are known."""


class Digest(Protocol):
    """A running hash of `hashlib`."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class ResumePoint(NamedTuple):
    """The point in the data at which a training stopped."""

    position: Position
    """The position of the next batch."""
    last: Position | None
    """The position of the batch that was trained on last."""
    first_pass: int
    """The pass in which the source was first trained on."""
    digest: str | None
    """The digest of all batches so far, if each was digested; else of the last batch. None before the first."""
    size: Size
    """The size of the data in the pass of the last batch."""
    left: Sequence[LeftPasses] = ()
    """The earlier passes that were left before their end."""

    @property
    def left_passes(self) -> dict[int, int]:
        """The batches taken of each pass that was left early."""
        return {pass_: number for first, stop, number in self.left for pass_ in range(first, stop)}

    @classmethod
    def from_json(cls, state: dict[str, Json]) -> ResumePoint:
        """Build a resume point from its `_asdict` in JSON. JSON has made lists of its tuples."""
        position = tuple(state["position"])
        last = state["last"]
        left = [(first, stop, number) for first, stop, number in state.get("left", ())]
        return cls(position, None if last is None else tuple(last), state["first_pass"], state["digest"], state["size"], left)


class SourceProgress:
    """The progress of a training in one source."""

    def __init__(self, first_pass: int = 0) -> None:
        self.first_pass = first_pass
        self.position: Position | None = None
        """The position of the next batch; None before the first."""
        self.last: Position | None = None
        """The position of the batch that was trained on last."""
        self.size: Size = {}
        """The size of the data in the pass of that batch."""
        self.left: list[LeftPasses] = []
        """The passes that were left before their end."""
        self._last_batch: PyTree = None
        self._running_digest: Digest | None = None
        self._digest: str | None = None

    @classmethod
    def restore(cls, place: ResumePoint, digest: Digest | None) -> SourceProgress:
        """Restore the progress at a resume point. `digest` is the running digest of the batches before it, if they were read."""
        progress = cls(place.first_pass)
        progress.position = place.position
        progress.last = place.last
        progress.size = place.size
        progress.left = list(place.left)
        progress._running_digest = digest
        progress._digest = place.digest
        return progress

    def digest_all(self) -> None:
        """Let the digest cover each batch from here on. Call it before the first batch."""
        if self.position is None and self._running_digest is None:
            self._running_digest = hashlib.sha256()

    @property
    def digests_all(self) -> bool:
        return self._running_digest is not None

    def note_trained(self, batch: PyTree, position: Position, size: Callable[[], Size]) -> None:
        """Note that the replicas got the batch of this position. `size` is called once in a pass: data may change after it."""
        if self.last is None or self.last[0] != position[0]:
            self.size = size()
        self.position = (position[0], position[1] + 1)
        self.last = position
        self._last_batch = batch
        if self._running_digest is not None:
            update_digest(self._running_digest, batch)

    def ended(self) -> None:
        """Note that the pass is over. The next batch is the first of the next pass."""
        if self.position is not None:
            self.position = self.position[0] + 1, 0

    def leave_pass(self) -> None:
        """Note that the loop takes no more batches of this pass. The next batch is the first of the next pass."""
        if self.position is not None and self.position[1]:
            pass_, number = self.position
            # Passes in a row that were left after the same number of batches are one entry.
            extends_last = bool(self.left) and self.left[-1][1:] == (pass_, number)
            first = self.left.pop()[0] if extends_last else pass_
            self.left.append((first, pass_ + 1, number))
            self.ended()

    @property
    def place(self) -> ResumePoint | None:
        """The current resume point; None before the first batch."""
        if self.position is None:
            return None
        if self._running_digest is not None:
            self._digest = f"all {self._running_digest.hexdigest()[:32]}"
        elif self._last_batch is not None:
            self._digest = f"last {digest_batch(self._last_batch)}"
        return ResumePoint(self.position, self.last, self.first_pass, self._digest, self.size, tuple(self.left))


def digest_batch(batch: PyTree) -> str:
    digest = hashlib.sha256()
    update_digest(digest, batch)
    return digest.hexdigest()[:32]


def update_digest(digest: Digest, batch: PyTree) -> None:
    """Add the shapes, dtypes and values of a batch to a digest."""
    for leaf in as_global_batch(batch, is_cut=False).leaves:
        digest.update(f"{leaf.array.shape} {leaf.array.dtype}\n".encode())
        digest.update(leaf.array.tobytes())
